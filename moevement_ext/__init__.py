# SPDX-License-Identifier: Apache-2.0
"""Engine of native sparse checkpointing for Mixture-of-Experts training; never imports Megatron.

A loop on plain torch needs `Job` and `TorchTrainer`. A loop that implements `Trainer` itself needs
the other names. Both groups need torch and are therefore imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moevement_ext.config import ConfigurationError, SparseCheckpointConfig
from moevement_ext.errors import (
    EXIT_OTHER_BITS,
    EXIT_STUCK,
    EXIT_USER_ERROR,
    EXIT_WHOLE_JOB,
    HostMemoryError,
    SparseCheckpointError,
    UserError,
)

if TYPE_CHECKING:
    from moevement_ext.capture.layout import OperatorSlices, TensorSlice
    from moevement_ext.job.job import Job
    from moevement_ext.job.torch_loop.module_operators import ModuleOperators
    from moevement_ext.job.torch_loop.torch_trainer import TorchTrainer
    from moevement_ext.membership.rank import Place
    from moevement_ext.memory.ledger import LedgerEntry
    from moevement_ext.memory.upstream_log.record import Direction
    from moevement_ext.recover.trainer import Committed, PlainLoop, Trainer

__version__ = '0.1.0'

__all__ = [
    'EXIT_OTHER_BITS',
    'EXIT_STUCK',
    'EXIT_USER_ERROR',
    'EXIT_WHOLE_JOB',
    'Committed',
    'ConfigurationError',
    'Direction',
    'HostMemoryError',
    'Job',
    'LedgerEntry',
    'ModuleOperators',
    'OperatorSlices',
    'Place',
    'PlainLoop',
    'SparseCheckpointConfig',
    'SparseCheckpointError',
    'TensorSlice',
    'TorchTrainer',
    'Trainer',
    'UserError',
    '__version__',
]

_FOR_LOOPS = {
    'Committed': 'recover.trainer',
    'Direction': 'memory.upstream_log.record',
    'Job': 'job.job',
    'LedgerEntry': 'memory.ledger',
    'ModuleOperators': 'job.torch_loop.module_operators',
    'OperatorSlices': 'capture.layout',
    'Place': 'membership.rank',
    'PlainLoop': 'recover.trainer',
    'TensorSlice': 'capture.layout',
    'TorchTrainer': 'job.torch_loop.torch_trainer',
    'Trainer': 'recover.trainer',
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that a broken installation is reported before torch loads."""
    if name in _FOR_LOOPS:
        return getattr(import_module(f'{__name__}.{_FOR_LOOPS[name]}'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
