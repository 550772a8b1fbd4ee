# SPDX-License-Identifier: Apache-2.0
"""Small collectives at start-up; fault-free iterations use none of them."""

import msgspec
import torch
from torch.distributed import Store


class Exchange:
    """Gives some bytes to all ranks and returns those of every rank, by rank.

    At the start of a job it is a collective of all ranks, and what was exchanged is kept in the
    launcher's store. A process that replaces a lost one reads it there, with what the lost one
    gave: the others are training.

    Args:
        archive: outlives the workers; None where no process is ever replaced.
        joining: this process replaces one of a running job.
    """

    def __init__(self, archive: Store | None = None, joining: bool = False) -> None:
        self._archive = archive
        self._joining = joining

    def __call__(self, name: str, own: bytes) -> list[bytes]:
        """Exchange under a name that is used once in the life of the job."""
        if self._joining:
            assert self._archive is not None  # else nobody could join
            return msgspec.msgpack.decode(self._archive.get(_key(name)), type=list[bytes])
        everyone: list[bytes] = [b''] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, own)
        if self._archive is not None and torch.distributed.get_rank() == 0:
            self._archive.set(_key(name), msgspec.msgpack.encode(everyone))  # type: ignore[arg-type]
        return everyone

    def all_agree(self, name: str, own: bool) -> bool:
        """True if it is true on every rank."""
        return all(answer == b'1' for answer in self(name, b'1' if own else b'0'))


def _key(name: str) -> str:
    return f'exchange/{name}'
