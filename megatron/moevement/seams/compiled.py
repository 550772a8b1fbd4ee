# SPDX-License-Identifier: Apache-2.0
"""Functions that upstream compiles (`jit_fuser`) compute the same bits in every life of a process.

A replay runs them in a process that has compiled them for other inputs, or in another order. What
depends on that, by default:

- After eight variants of a function (shapes, types, operators that are frozen or not) torch runs it
  uncompiled from then on, which rounds otherwise and draws other random numbers.
- Compiled code draws random numbers of its own, uncompiled code those of the eager kernels.
- Kernels on a GPU are chosen by a measurement, and a sum over rows that fit into one block is split
  by how many rows the first input had.

Read in torch 2.11 and 2.14.
"""

import logging
import os
from collections.abc import Mapping
from types import ModuleType

import torch
from torch.torch_version import TorchVersion

logger = logging.getLogger(__name__)

_WITHOUT_LIMIT = 1 << 30
_DYNAMO = {'recompile_limit': _WITHOUT_LIMIT, 'accumulated_recompile_limit': _WITHOUT_LIMIT}
_INDUCTOR = {
    'fallback_random': True,
    'deterministic': True,
    'batch_invariant': True,
    'max_autotune': False,
    'max_autotune_pointwise': False,
    'max_autotune_gemm': False,
    'coordinate_descent_tuning': False,
}
_WITHOUT_INVARIANCE = {'triton.persistent_reductions': False}
"""Where torch has no `batch_invariant`: sums in steps, which are alike for any number of rows."""
_ALIKE_UNTIL = '2.12'
"""Before that version of torch, rows do not count in the first place."""


def make_repeatable(deterministic: bool, warns: bool) -> None:
    """Have torch compile independently of the life of this process. Before iteration 1.

    Args:
        deterministic: the job was asked for equal bits (`--deterministic-mode`). Else only what
            costs nothing is set.
        warns: this rank says that they cannot be promised.
    """
    compiles = os.environ.get('TORCHDYNAMO_DISABLE') != '1'
    if warns and not deterministic and (compiles or torch.cuda.is_available()):
        logger.warning(
            'sparse checkpointing: without --deterministic-mode a recovery may end in other bits '
            'than training without the failure: kernels may add in another order or be chosen '
            'anew, and compiled functions draw random numbers of their own.'
        )
    if not compiles:
        return
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    _set(dynamo, _DYNAMO)
    if deterministic:
        invariant = 'batch_invariant' in inductor.get_config_copy()
        alike = invariant or TorchVersion(torch.__version__) < _ALIKE_UNTIL
        _set(inductor, _INDUCTOR if alike else _INDUCTOR | _WITHOUT_INVARIANCE)


def _set(config: ModuleType, settings: Mapping[str, object]) -> None:
    """What this torch has of `settings`."""
    known = config.get_config_copy()
    for name, value in settings.items():
        if name in known:
            config.load_config({name: value})
