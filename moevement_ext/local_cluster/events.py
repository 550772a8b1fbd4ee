# SPDX-License-Identifier: Apache-2.0
"""What the launcher reports; as text, one line for a person."""

import signal
from dataclasses import dataclass
from pathlib import Path

from moevement_ext.local_cluster.config import StagedFault


def describe_exit(code: int) -> str:
    """How a process ended.

    Args:
        code: exit status, or the negative number of a signal.
    """
    if code >= 0:
        return f'ended with exit status {code}'
    try:
        return f'was killed by {signal.Signals(-code).name}'
    except ValueError:  # a real-time signal has no name
        return f'was killed by signal {-code}'


@dataclass(frozen=True)
class WorkerStarted:
    """A worker runs, in its first life or a later one."""

    rank: int
    pid: int
    restarts: int
    """How often this rank was restarted."""
    was_spare: bool

    def __str__(self) -> str:
        how = 'a hot spare takes over' if self.was_spare else 'started'
        return f'rank {self.rank}: {how}, pid {self.pid}, restart {self.restarts}'


@dataclass(frozen=True)
class WorkerEnded:
    """A worker is gone."""

    rank: int
    pid: int
    code: int
    """Exit status, or the negative number of the signal that killed it."""

    def __str__(self) -> str:
        return f'rank {self.rank} (pid {self.pid}) {describe_exit(self.code)}'


@dataclass(frozen=True)
class WorkerStopped:
    """The launcher has killed a worker to start it again with all the others."""

    rank: int
    pid: int

    def __str__(self) -> str:
        return f'rank {self.rank} (pid {self.pid}) is stopped'


@dataclass(frozen=True)
class WorkerLostAtExit:
    """A worker that had done all its work was killed by a signal before its process ended."""

    rank: int
    pid: int
    code: int
    """The negative number of the signal."""

    def __str__(self) -> str:
        how = describe_exit(self.code)
        return f'warning: rank {self.rank} (pid {self.pid}) had finished, but {how} at its exit'


@dataclass(frozen=True)
class WorkerLate:
    """A worker has not come to join the others, who wait for it; it is killed."""

    rank: int
    pid: int

    def __str__(self) -> str:
        return f'rank {self.rank} (pid {self.pid}) has not come to join the others: killed'


@dataclass(frozen=True)
class WorkerUndead:
    """A worker was killed and does not die; the launcher ends without it."""

    rank: int
    pid: int

    def __str__(self) -> str:
        return f'rank {self.rank} (pid {self.pid}) does not die of SIGKILL; it is left behind'


@dataclass(frozen=True)
class AllStartAgain:
    """The others cannot go on without the worker that died: all are killed and started again."""

    reason: str

    def __str__(self) -> str:
        return f'all workers start again, since {self.reason}'


@dataclass(frozen=True)
class WorkerEvicted:
    """The others found this worker hung; it is killed."""

    rank: int
    pid: int

    def __str__(self) -> str:
        return f'rank {self.rank} (pid {self.pid}) was found hung by the others: killed'


@dataclass(frozen=True)
class StoreLost:
    """Nobody serves the store any more; who dies meanwhile waits to be replaced."""

    address: str | None
    """That of `--sparse-ckpt-store`."""

    def __str__(self) -> str:
        which = '' if self.address is None else f' {self.address}'
        return (
            f'the store{which} is lost: start one there (python -m moevement_ext.store); until '
            'then no worker is replaced'
        )


@dataclass(frozen=True)
class StoreFound:
    """A store is there again: the same, or an empty one."""

    def __str__(self) -> str:
        return 'the store is reached again'


@dataclass(frozen=True)
class SpareReady:
    """A hot spare has imported the program."""

    pid: int

    def __str__(self) -> str:
        return f'hot spare ready, pid {self.pid}'


@dataclass(frozen=True)
class SpareEnded:
    """A hot spare is gone before it was used; one that never was ready is not replaced."""

    pid: int
    code: int
    was_ready: bool

    def __str__(self) -> str:
        how = '' if self.was_ready else ' before it was ready; there will be one spare less'
        return f'hot spare (pid {self.pid}) {describe_exit(self.code)}{how}'


@dataclass(frozen=True)
class SpareMissing:
    """A hot spare could not be started; the job goes on with one less."""

    reason: str

    def __str__(self) -> str:
        return f'a hot spare cannot be started, there will be one less: {self.reason}'


@dataclass(frozen=True)
class FaultStaged:
    """A staged failure happened."""

    fault: StagedFault
    deleted: Path | None = None
    """Host memory of the node that was killed."""

    def __str__(self) -> str:
        also = '' if self.deleted is None else f'; deleted {self.deleted}'
        return f'staged failure {self.fault}{also}'


@dataclass(frozen=True)
class NodeReady:
    """A host is reached and can take the place of a node of the job."""

    host: str

    def __str__(self) -> str:
        return f'host {self.host} is ready'


@dataclass(frozen=True)
class NodeSeated:
    """A host is a node of the job from now on."""

    host: str
    node: int

    def __str__(self) -> str:
        return f'host {self.host} is node {self.node} of the job'


@dataclass(frozen=True)
class NodeLost:
    """A host is not reached any more, with all that ran there."""

    host: str
    node: int | None
    """That it was; None: a spare."""
    reason: str

    def __str__(self) -> str:
        what = 'a spare' if self.node is None else f'node {self.node} of the job'
        return f'host {self.host}, {what}, is lost: {self.reason}'


@dataclass(frozen=True)
class NodeMissing:
    """A host was asked for an agent, and none came."""

    host: str
    reason: str

    def __str__(self) -> str:
        return f'host {self.host} is not reached: {self.reason}'


@dataclass(frozen=True)
class DevicesFailing:
    """Something is wrong with a device of a host."""

    host: str
    trouble: str
    usable: bool

    def __str__(self) -> str:
        what = 'can be used all the same' if self.usable else 'gets no rank any more'
        return f'host {self.host} {what}: {self.trouble}'


@dataclass(frozen=True)
class JobRecovered:
    """All workers are back after a failure; they say so in a line."""

    line: str
    spares: str
    """What is left to take the place of the next that is lost."""

    def __str__(self) -> str:
        line = self.line.strip().removeprefix('sparse ckpt | ').removesuffix(' |')
        kept = [field for field in line.split(' | ') if not field.startswith('spares left: ')]
        return ' | '.join([*kept[1:], f'spares left: {self.spares}'])  # it has a time of its own

    @property
    def nothing_lost(self) -> bool:
        """No iteration, and no bit that was compared."""
        differs = ', differing: ' in self.line and ', differing: 0' not in self.line
        return ' lost iterations: 0 ' in self.line and not differs


@dataclass(frozen=True)
class JobEnded:
    """All workers are gone: the last thing that a launcher says of a job, but for its memory."""

    code: int
    seconds: float
    failures: int
    """Workers that were replaced alone, or new starts of all."""
    recoveries: int
    """How often all ranks have said that they are back."""

    def __str__(self) -> str:
        how = 'ended well' if self.code == 0 else f'ended with exit status {self.code}'
        return (
            f'the job {how} after {in_words(self.seconds)} | workers lost: {self.failures} | '
            f'recoveries: {self.recoveries}'
        )


def in_words(seconds: float) -> str:
    """A duration for a person, such as `2 h 03 min` or `12 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f'{hours} h {minutes:02d} min'
    return f'{minutes} min {rest:02d} s' if minutes else f'{rest} s'


@dataclass(frozen=True)
class JobFailed:
    """The job is given up; all its processes are killed."""

    reason: str

    def __str__(self) -> str:
        return f'job failed: {self.reason}'


@dataclass(frozen=True)
class MemoryKept:
    """All workers are gone; what they kept in host memory is not."""

    directory: Path

    def __str__(self) -> str:
        return (
            f'windows of this run stay in {self.directory}: launch the same job again to go on '
            'from them, or remove the directory'
        )


Event = (
    WorkerStarted
    | WorkerEnded
    | WorkerStopped
    | WorkerLostAtExit
    | WorkerEvicted
    | WorkerLate
    | WorkerUndead
    | AllStartAgain
    | StoreLost
    | StoreFound
    | SpareReady
    | SpareEnded
    | SpareMissing
    | FaultStaged
    | NodeReady
    | NodeSeated
    | NodeLost
    | NodeMissing
    | DevicesFailing
    | JobRecovered
    | JobEnded
    | JobFailed
    | MemoryKept
)
