# SPDX-License-Identifier: Apache-2.0
"""Environment variables of torch and NCCL that let a process survive the loss of a peer.

torch and NCCL read most of these variables with the first process group, so the engine sets them
before that. Checked against the sources of torch 2.11 and 2.15.
"""

import os
from typing import NamedTuple

import torch

from moevement_ext.errors import UserError
from moevement_ext.logger import logger_of

logger = logger_of(__name__)

BACKEND = 'nccl'
"""Name of the backend that these variables are for."""
_OLDEST_NCCL = (2, 26, 2)


class _Setting(NamedTuple):
    value: str
    otherwise: str
    """Consequence of another value."""


# With other values torch's watchdog may abort the communicators of a lost peer by itself: waits
# return, with undefined bytes, before a failure is announced. So this variable is always set, even
# over the value that torchrun's agent sets for its workers.
_ALWAYS_SET = 'TORCH_NCCL_ASYNC_ERROR_HANDLING'

SETTINGS = {
    'TORCH_DIST_USE_NCCL2': _Setting('0', 'process groups cannot be connected anew'),
    _ALWAYS_SET: _Setting('0', 'waits return undefined bytes'),
    'TORCH_NCCL_DUMP_ON_TIMEOUT': _Setting('0', 'torch may end survivors, to write a trace'),
    'TORCH_NCCL_EXTRA_DUMP_ON_EXEC': _Setting('0', 'a recovery waits for a trace of each group'),
    'TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC': _Setting('1', 'a recovery waits for traces, a minute'),
    'TORCH_NCCL_ENABLE_MONITORING': _Setting('0', 'torch ends processes whose GPU waits long'),
    'TORCH_NCCL_RETHROW_CUDA_ERRORS': _Setting('0', 'torch ends survivors after a CUDA error'),
    # Either one turns torch's error handling on again, or removes the thread that aborts need.
    'TORCH_NCCL_DESYNC_DEBUG': _Setting('0', 'torch stops watching once a rank is lost'),
    'TORCH_NCCL_BLOCKING_WAIT': _Setting('0', 'waits for a lost rank end only by their timeout'),
    'TORCH_NCCL_USE_COMM_NONBLOCKING': _Setting('0', 'communicators may hang when connected'),
    'NCCL_NVLS_ENABLE': _Setting('0', 'communicators may hang when they are aborted'),
}


def prepare() -> None:
    """Set the variables that the user has not set, and warn about other values.

    Every rank of a job with localized recovery calls this before the first process group.
    Raises `UserError` if NCCL is too old.
    """
    _check_version()
    os.environ[_ALWAYS_SET] = SETTINGS[_ALWAYS_SET].value
    for name, (value, otherwise) in SETTINGS.items():
        found = os.environ.setdefault(name, value)
        if found != value and os.environ.get('LOCAL_RANK', '0') == '0':
            logger.warning('%s=%s: %s; unset it', name, found, otherwise)


def _check_version() -> None:
    if not torch.distributed.is_nccl_available():
        return  # torch itself reports the missing NCCL
    version = tuple(torch.cuda.nccl.version())[:3]
    if version < _OLDEST_NCCL:
        raise UserError(
            f'NCCL {_dotted(version)} may hang when a rank is lost; a localized recovery needs '
            f'{_dotted(_OLDEST_NCCL)} or newer: install a torch that brings it, or set '
            '--sparse-ckpt-recovery whole-job.'
        )


def _dotted(version: tuple[int, ...]) -> str:
    return '.'.join(map(str, version))
