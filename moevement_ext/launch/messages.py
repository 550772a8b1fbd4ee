# SPDX-License-Identifier: Apache-2.0
"""Messages between the supervisor, on the batch host, and the agents, one per node.

An agent sends `Here`, receives the `Program`, and then carries out the supervisor's orders. Both
ends send `Alive` every second. When the connection is lost, or silent for `SILENT_S`, the
supervisor considers the node lost, and the agent kills its workers and ends, so that no rank runs
on two nodes for long.
"""

import os
from pathlib import Path

import msgspec

from moevement_ext.launch.launch_config import LaunchConfig

SILENT_S = 30.0


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat."""


class Here(msgspec.Struct, frozen=True, tag=True):
    """First message of an agent."""

    host: str
    trouble: str = ''
    """Faults of the node's devices; empty: none known."""


class DevicesFail(msgspec.Struct, frozen=True, tag=True):
    """A device of the node has a new fault."""

    trouble: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """A worker process started."""

    key: int
    """Key of the worker's `StartWorker`."""
    pid: int
    was_spare: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker is dead, and so are the processes that it started."""

    key: int
    code: int
    """Exit status, or the negative number of the signal that killed it."""
    last_lines: list[str]


class Killed(msgspec.Struct, frozen=True, tag=True):
    """Another process has killed the worker, such as its watchdog; it may not have died yet."""

    key: int


class IterationLogged(msgspec.Struct, frozen=True, tag=True):
    """A watched worker printed that an iteration is over; not sent for workers with a log."""

    key: int
    iteration: int


class MemorySeen(msgspec.Struct, frozen=True, tag=True):
    """What a node has room for, and the windows in its memory."""

    node: str
    trouble: str = ''
    """Why the ranks have no room, with the bytes; empty: they have."""
    windows: list[tuple[int, int, str]] = []
    """Holder, owner and name of each committed window or stub."""


class Happened(msgspec.Struct, frozen=True, tag=True):
    """A launcher event, as a line of JSON."""

    line: bytes


class Program(msgspec.Struct, frozen=True, tag=True):
    """First message of the supervisor."""

    directory: str
    """Working directory of the launcher, for relative paths of the user."""
    program: str
    flags: list[str]
    log_dir: str | None
    defaults: dict[str, str]
    """Environment variables of the workers that the user may override."""


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """Start a worker, from a hot spare if there is one."""

    key: int
    rank: int
    variables: dict[str, str]
    """Environment variables of the worker; these override the user's."""
    watched: bool
    """The supervisor watches the progress of this worker."""


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a worker and the processes that it started."""

    key: int
    number: int


class KeepSpares(msgspec.Struct, frozen=True, tag=True):
    """Change the number of hot spares, at first 0; surplus spares stay until they are used."""

    count: int


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Reserve pages in host memory for ranks that may move to this node."""

    directory: str
    """`--sparse-ckpt-dir`."""
    run_id: str
    sizes: list[int]
    """Size of each file in bytes."""


class _OfNode(msgspec.Struct, frozen=True):
    node: str
    directory: str
    """`--sparse-ckpt-dir`."""
    run_id: str


class LookAtMemory(_OfNode, frozen=True, tag=True):
    """Answer with a `MemorySeen`; an empty run id: the run keeps nothing in memory yet."""

    nbytes: dict[int, int]
    """Bytes that each rank keeps, if these ranks run here; empty: do not check the room."""
    devices: list[int]
    """GPUs that the ranks of one more seat use."""
    seats: int
    """Number of seats whose ranks use these GPUs now."""


class Vacate(_OfNode, frozen=True, tag=True):
    """Kill processes of ranks that have moved from this node, and delete their memory here."""

    ranks: list[int]


class SimulateNodeLoss(_OfNode, frozen=True, tag=True):
    """Simulate the loss of a node: kill its processes and delete the run's memory there.

    An agent also kills itself, as it serves only this node.
    """


FromAgent = (
    Alive | Here | DevicesFail | Started | Ended | Killed | IterationLogged | MemorySeen | Happened
)
FromSupervisor = (
    Alive
    | Program
    | StartWorker
    | Signal
    | KeepSpares
    | Reserve
    | LookAtMemory
    | Vacate
    | SimulateNodeLoss
)
FROM_AGENT: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
FROM_SUPERVISOR: msgspec.msgpack.Decoder[FromSupervisor] = msgspec.msgpack.Decoder(FromSupervisor)


def program(config: LaunchConfig, defaults: dict[str, str]) -> Program:
    here = _directory()
    log_dir = None if config.log_dir is None else str(here / config.log_dir)
    return Program(str(here), config.program, list(config.flags), log_dir, defaults)


def _directory() -> Path:
    """The working directory by the user's path, which may be the only one in an image."""
    named = Path(os.environ.get('PWD', ''))
    is_it = named.is_absolute() and named.is_dir() and named.samefile('.')
    return named if is_it else Path.cwd()
