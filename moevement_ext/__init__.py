# SPDX-License-Identifier: Apache-2.0
"""Engine of native sparse checkpointing for Mixture-of-Experts training; never imports Megatron."""

from moevement_ext.config import ConfigurationError, SparseCheckpointConfig
from moevement_ext.errors import (
    EXIT_STUCK,
    EXIT_USER_ERROR,
    EXIT_WHOLE_JOB,
    HostMemoryError,
    SparseCheckpointError,
    UserError,
)

__version__ = '0.1.0'

__all__ = [
    'EXIT_STUCK',
    'EXIT_USER_ERROR',
    'EXIT_WHOLE_JOB',
    'ConfigurationError',
    'HostMemoryError',
    'SparseCheckpointConfig',
    'SparseCheckpointError',
    'UserError',
    '__version__',
]
