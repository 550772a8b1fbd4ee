# SPDX-License-Identifier: Apache-2.0
"""NCCL's groups of calls, which torch opens around sends, receives and coalescing regions.

While a group is open on a thread, NCCL notes every call of that thread, of any communicator, and
starts none; a communicator that is made meanwhile has no ranks yet. An exception between the begin
and the end of a group leaves it open: `batch_isend_irecv` opens one, `ProcessGroupNCCL` another one
around each send and receive of it, and torch counts the first kind only. An end that fails closes
the group but stays in torch's count.

Read in torch 2.11 and 2.14 and NCCL 2.28; seen on a GPU with torch 2.11.
"""

import ctypes
from pathlib import Path

import torch

from moevement_ext.regroup.internals import UnsupportedTorchError

# torch's count of the groups that it has opened; each thread has its own.
_COUNT = '_ZN4c10d16ProcessGroupNCCL23ncclActiveGroupCounter_E'
# ncclInvalidUsage.
_NOT_IN_A_GROUP = 5
# Far more groups than torch opens inside of each other.
_DEEPEST = 64


class OpenCalls:
    """The groups of calls that are open on the calling thread.

    Raises:
        UnsupportedTorchError: torch's library does not export what this calls.
    """

    def __init__(self) -> None:
        path = Path(torch.__file__).parent / 'lib' / 'libtorch_cuda.so'
        try:
            self._library = ctypes.CDLL(str(path))
            self._end = self._library.ncclGroupEnd  # of libnccl, which the library is linked to
            self._count()
        except (AttributeError, OSError, ValueError) as error:
            raise UnsupportedTorchError(
                f"does not give access to NCCL's groups of calls ({error})"
            ) from error

    def close(self) -> None:
        """Close all of them, whatever torch believes, and have torch believe that."""
        for _ in range(_DEEPEST):
            if self._end() == _NOT_IN_A_GROUP:
                break
        self._count().value = 0

    def _count(self) -> ctypes.c_uint64:
        """That of the calling thread."""
        return ctypes.c_uint64.in_dll(self._library, _COUNT)
