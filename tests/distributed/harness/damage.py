# SPDX-License-Identifier: Apache-2.0
"""Windows in the host memory of a job that is down, and ways to damage them."""

from pathlib import Path

from tests.distributed.harness.cluster import Cluster

_OFFSET = 70_000
"""Offset behind the header: the damage is found only when the window is verified."""


def windows(job: Cluster, node: int, holder: int, owner: int) -> list[Path]:
    """Committed windows in one place, newest first."""
    found = (job.node_memory(node) / str(holder) / str(owner)).glob('window-*.window')
    return sorted(found, key=_start, reverse=True)


def copies_of_newest(job: Cluster, owner: int) -> list[Path]:
    """All copies, on all nodes and holders, of the newest window of an owner."""
    copies = list(job.memory.rglob(f'{owner}/window-*.window'))
    newest = max(map(_start, copies))
    return [path for path in copies if _start(path) == newest]


def flip_byte(path: Path, offset: int = _OFFSET) -> None:
    with open(path, 'r+b') as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def _start(path: Path) -> int:
    return int(path.name.split('-')[1])
