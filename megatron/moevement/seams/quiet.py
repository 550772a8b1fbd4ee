# SPDX-License-Identifier: Apache-2.0
"""Leaves out of the log what upstream says again and again, and what is not so on a CPU.

Nothing else is changed; with `MOEVEMENT_UPSTREAM_LOG=all` in the environment nothing is left out.

- *CPU RNG state changed within GPU RNG context*: on a machine without a GPU the generator of the
  "GPU" is that of the CPU (see `cpu_device`), so upstream finds this in every layer and iteration,
  and it is never a fault.
- That Transformer Engine and Apex are not installed, which several modules say in each process: on
  a machine without a GPU, where neither is of use, the first process of a job says it once.
- The arguments, some 400 lines: a worker that is started again has the same. With `--sparse-ckpt`.

Checked against megatron-core 0.19.2.
"""

import argparse
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise

from megatron.moevement.seams import patches
from moevement_ext.errors import UserError

SHOW_ALL = 'MOEVEMENT_UPSTREAM_LOG'
_NOT_SO = 'CPU RNG state changed within GPU RNG context'
_NOT_INSTALLED = r'(Transformer Engine and )?Apex (is|are) not installed|Only transformer-engine>='
_SAID_ONCE = r'megatron\.core\.optimizer$'
_ON_A_CPU = (
    '--distributed-backend gloo --transformer-impl local --no-gradient-accumulation-fusion '
    '--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion '
    '--no-bias-gelu-fusion --no-bias-dropout-fusion'
)
_SHORTEST_BACKEND = '--distributed-b'
"""Upstream's parser takes abbreviations."""


def everything_is_shown() -> bool:
    """The user wants all that upstream says."""
    return os.environ.get(SHOW_ALL) == 'all'


def on_a_cpu() -> None:
    """Leave out what is not so, or of no use, without a GPU. Before upstream is imported."""
    if everything_is_shown():
        return
    logging.getLogger('megatron.core.tensor_parallel.random').addFilter(_is_so)
    logging.getLogger('torch.utils.cpp_extension').addFilter(_no_search_for_cuda)
    warnings.filterwarnings('ignore', _NOT_INSTALLED, UserWarning, r'megatron\.')
    if os.environ.get('RANK', '0') == '0' and not _is_restarted():
        warnings.filterwarnings('default', _NOT_INSTALLED, UserWarning, _SAID_ONCE)


def arguments_once() -> None:
    """A protected worker that is started again does not print its arguments again."""
    if _is_restarted() and not everything_is_shown():
        patches.wrap('megatron.training.arguments:_print_args', _not_again)


def refuse_without_gpu(flags: Sequence[str]) -> None:
    """On a machine without a GPU, before anything is imported for long.

    Args:
        flags: of the command line.

    Raises:
        UserError: they ask for a backend that only GPUs have; says which flags a CPU needs.
    """
    if any(flag in ('-h', '--help') or flag.startswith('--yaml') for flag in flags):
        return
    backend = 'nccl'  # upstream's default
    for flag, following in pairwise([*flags, '']):
        name, _, value = flag.partition('=')
        if name.startswith(_SHORTEST_BACKEND):
            backend = value or following
    if backend == 'nccl':
        raise UserError(
            'no GPU is visible here, and --distributed-backend is nccl, which needs some: start it '
            f'where GPUs are, or, to try it on the CPU, add {_ON_A_CPU}'
        )


def _is_restarted() -> bool:
    return os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') != '0'


def _is_so(record: logging.LogRecord) -> bool:
    return record.getMessage() != _NOT_SO


def _no_search_for_cuda(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith('No CUDA runtime is found')


def _not_again(original: Callable[..., object], title: str, args: argparse.Namespace) -> None:
    if not args.sparse_ckpt:
        original(title, args)
    elif args.rank == 0:
        print(f'{title}: as at the first start, where they were printed', flush=True)
