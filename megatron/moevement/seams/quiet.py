# SPDX-License-Identifier: Apache-2.0
"""Filters upstream's repeated log messages, and those that are wrong on a CPU.

Nothing else is changed; with `MOEVEMENT_UPSTREAM_LOG=all` in the environment nothing is filtered.

- *CPU RNG state changed within GPU RNG context*: on a machine without a GPU the generator of the
  "GPU" is that of the CPU (see `cpu_device`), so upstream warns in every layer and iteration
  although nothing is wrong.
- Warnings that Transformer Engine and Apex are not installed, from several modules of each process:
  on a machine without a GPU, where both are useless, only the first process of a job warns, once.
- With `--sparse-ckpt`, the list of arguments, some 400 lines, in a restarted worker: it is
  unchanged.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise

from megatron.moevement.seams import patches, without_gpu
from moevement_ext.errors import UserError

SHOW_ALL = 'MOEVEMENT_UPSTREAM_LOG'
_NOT_SO = 'CPU RNG state changed within GPU RNG context'
_NOT_INSTALLED = r'(Transformer Engine and )?Apex (is|are) not installed|Only transformer-engine>='
_SAID_ONCE = r'megatron\.core\.optimizer$'
# Shortest abbreviation of --distributed-backend that upstream's parser accepts.
_SHORTEST_BACKEND = '--distributed-b'


def everything_is_shown() -> bool:
    """True if the user wants upstream's full log."""
    return os.environ.get(SHOW_ALL) == 'all'


def on_a_cpu() -> None:
    """Filter messages that are wrong or useless without a GPU. Call before upstream is imported."""
    if everything_is_shown():
        return
    logging.getLogger('megatron.core.tensor_parallel.random').addFilter(
        lambda record: record.getMessage() != _NOT_SO
    )
    logging.getLogger('torch.utils.cpp_extension').addFilter(
        lambda record: not record.getMessage().startswith('No CUDA runtime is found')
    )
    warnings.filterwarnings('ignore', _NOT_INSTALLED, UserWarning, r'megatron\.')
    if os.environ.get('RANK', '0') == '0' and not _is_restarted():
        warnings.filterwarnings('default', _NOT_INSTALLED, UserWarning, _SAID_ONCE)


def arguments_once() -> None:
    """Keep a restarted worker of a protected job from printing its arguments again."""
    if _is_restarted() and not everything_is_shown():
        patches.wrap('megatron.training.arguments:_print_args', _not_again)


def refuse_without_gpu(flags: Sequence[str]) -> None:
    """Refuse GPU-only flags on a machine without a GPU, before slow imports.

    Raises:
        UserError: the backend needs GPUs; the message names the flags for a CPU.
    """
    if any(flag in ('-h', '--help') or flag.startswith('--yaml') for flag in flags):
        return
    backend = 'nccl'  # upstream's default value
    for flag, following in pairwise([*flags, '']):
        name, _, value = flag.partition('=')
        if name.startswith(_SHORTEST_BACKEND):
            backend = value or following
    if backend == 'nccl':
        raise UserError(
            'no GPU is visible here, and --distributed-backend nccl needs GPUs: start the job on a '
            f'machine with GPUs, or, to try it on the CPU, add {without_gpu.FLAGS}'
        )


def _is_restarted() -> bool:
    return os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') != '0'


def _not_again(original: Callable[..., object], title: str, args: argparse.Namespace) -> None:
    if not args.sparse_ckpt:
        original(title, args)
    elif args.rank == 0:
        print(f'{title}: as at the first start, where they were printed', flush=True)
