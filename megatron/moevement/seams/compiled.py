# SPDX-License-Identifier: Apache-2.0
"""Makes functions that upstream compiles (`jit_fuser`) compute equal bits in every process.

A replay runs these functions in a process that compiled them for other inputs or in another order.
By default, three results depend on that history:

- After eight variants of a function (shapes, types, frozen or trained operators) torch runs it
  uncompiled from then on, with other rounding and other random numbers.
- Compiled code has its own random number algorithm; uncompiled code uses that of the eager kernels.
- Kernels on a GPU are selected by a measurement, and a sum over rows that fit into one block is
  split by the number of rows of the first input.

Checked by reading the sources of torch 2.11 and 2.14.
"""

import os
from collections.abc import Mapping
from types import ModuleType

import torch
from torch.torch_version import TorchVersion

from moevement_ext.logger import logger_of

logger = logger_of(__name__)

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
# For torch without `batch_invariant`: sums in steps, which are equal for any number of rows.
_WITHOUT_INVARIANCE = {'triton.persistent_reductions': False}
# Earlier versions of torch ignore the number of rows anyway.
_ALIKE_UNTIL = '2.12'


def make_repeatable(deterministic: bool, warns: bool) -> None:
    """Make torch compile independently of this process's history. Call before iteration 1.

    Args:
        deterministic: `--deterministic-mode` was given; otherwise only settings without cost apply.
        warns: this rank warns if equal bits cannot be guaranteed.
    """
    compiles = os.environ.get('TORCHDYNAMO_DISABLE') != '1'
    if warns and not deterministic and (compiles or torch.cuda.is_available()):
        logger.warning(
            'without --deterministic-mode (in a loop of your own: '
            'torch.use_deterministic_algorithms) a recovery may end in other bits than training '
            'without the failure: kernels may add in another order or be selected again, and '
            'compiled functions draw other random numbers.'
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
    """Apply those of `settings` that this torch has."""
    known = config.get_config_copy()
    for name, value in settings.items():
        if name in known:
            config.load_config({name: value})
