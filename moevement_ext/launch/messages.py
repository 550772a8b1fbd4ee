# SPDX-License-Identifier: Apache-2.0
"""What the supervisor, on the batch host, and the agents, one a node, say to each other.

An agent says `Here`, is told the `Program`, and does then as it is told. Both send `Alive` every
second. When the connection is lost, or nothing is heard for `SILENT_S`, the supervisor takes the
node for lost, and the agent kills its workers and ends: so no rank runs on two nodes for long.
"""

import msgspec

from moevement_ext.launch.launch_config import LaunchConfig

SILENT_S = 30.0


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Sign of life."""


class Here(msgspec.Struct, frozen=True, tag=True):
    """First message of an agent."""

    host: str
    trouble: str = ''
    """What is wrong with its devices; empty: nothing is known to be."""
    usable: bool = True
    """They can be used all the same."""


class DevicesFail(msgspec.Struct, frozen=True, tag=True):
    """Something is newly wrong with a device of the node."""

    trouble: str
    usable: bool
    """It can be used all the same."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """A worker runs."""

    key: int
    """The one in its `StartWorker`."""
    pid: int
    was_spare: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A worker is dead, and so is what it left behind."""

    key: int
    code: int
    """Exit status, or the negative number of the signal that killed it."""
    last_lines: list[str]


class IterationLogged(msgspec.Struct, frozen=True, tag=True):
    """A worker that is watched has printed that an iteration is over; not if it has a log."""

    key: int
    iteration: int


class Happened(msgspec.Struct, frozen=True, tag=True):
    """Something that the launcher reports, as a line of JSON."""

    line: bytes


class Program(msgspec.Struct, frozen=True, tag=True):
    """First message of the supervisor."""

    program: str
    flags: list[str]
    log_dir: str | None
    defaults: dict[str, str]
    """Environment of the workers, where the user has not set it."""
    fork: bool


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """Start a worker, from a hot spare if one is ready."""

    key: int
    rank: int
    variables: dict[str, str]
    """Environment of the worker, whatever the user has set."""
    watched: bool
    """The supervisor has to know how far it is."""


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a worker and what it started."""

    key: int
    number: int


class KeepSpares(msgspec.Struct, frozen=True, tag=True):
    """Have so many hot spares from now on; those that there are stay until they are needed."""

    count: int


class Vanish(msgspec.Struct, frozen=True, tag=True):
    """End as a node does that loses its power, with what it keeps of the run in memory.

    An agent that has no other node is lost, too.
    """

    node: str
    directory: str
    """`--sparse-ckpt-dir`."""
    run_id: str


FromAgent = Alive | Here | DevicesFail | Started | Ended | IterationLogged | Happened
FromSupervisor = Alive | Program | StartWorker | Signal | KeepSpares | Vanish
FROM_AGENT: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
FROM_SUPERVISOR: msgspec.msgpack.Decoder[FromSupervisor] = msgspec.msgpack.Decoder(FromSupervisor)


def program(config: LaunchConfig, defaults: dict[str, str]) -> Program:
    """What is said of a job; `defaults` as in `Program`."""
    log_dir = None if config.log_dir is None else str(config.log_dir.absolute())
    return Program(config.program, list(config.flags), log_dir, defaults, config.fork)
