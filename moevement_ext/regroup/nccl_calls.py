# SPDX-License-Identifier: Apache-2.0
"""NCCL's groups of calls, which torch opens around sends, receives and coalescing regions.

While a group is open on a thread, NCCL only records that thread's calls, of any communicator, and
starts none; a communicator created meanwhile has no ranks yet. An exception between begin and end
leaves a group open. `batch_isend_irecv` opens one group, `ProcessGroupNCCL` opens another around
each send and receive, and torch counts only the first kind. A failing end closes the group but
stays in torch's count.

Read in torch 2.11 and 2.14 and NCCL 2.28; seen on a GPU with torch 2.11.
"""

import ctypes
from pathlib import Path

import torch

from moevement_ext.regroup.internals import UnsupportedTorchError

# torch's count of the groups that it has opened, per thread.
_COUNT = '_ZN4c10d16ProcessGroupNCCL23ncclActiveGroupCounter_E'
# ncclInvalidUsage.
_NOT_IN_A_GROUP = 5
# Far deeper than torch nests groups.
_DEEPEST = 64


class OpenCalls:
    """The open groups of calls on the calling thread.

    Raises `UnsupportedTorchError` if torch's library does not export the symbols.
    """

    def __init__(self) -> None:
        path = Path(torch.__file__).parent / 'lib' / 'libtorch_cuda.so'
        try:
            self._library = ctypes.CDLL(str(path))
            self._end = self._library.ncclGroupEnd  # from libnccl, which torch's library links to
            self._count()
        except (AttributeError, OSError, ValueError) as error:
            raise UnsupportedTorchError(
                f"does not give access to NCCL's groups of calls ({error})"
            ) from error

    def close(self) -> None:
        """Close all open groups, regardless of torch's count, and reset that count."""
        for _ in range(_DEEPEST):
            if self._end() == _NOT_IN_A_GROUP:
                break
        self._count().value = 0

    def _count(self) -> ctypes.c_uint64:
        return ctypes.c_uint64.in_dll(self._library, _COUNT)
