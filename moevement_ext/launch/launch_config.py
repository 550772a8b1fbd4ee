# SPDX-License-Identifier: Apache-2.0
"""Launch configuration: the program and its flags, the number of nodes, the staged failures."""

import enum
import math
import secrets
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from moevement_ext.config import RESTART, ConfigurationError, SparseCheckpointConfig, slurm_run_id
from moevement_ext.config_file import value_of


class StagedAction(enum.StrEnum):
    """Kinds of staged failures; the values are the launcher's flags."""

    KILL = '--kill'
    KILL_NODE = '--kill-node'
    LOSE_NODE = '--lose-node'
    RETURN_NODE = '--return-node'
    STOP = '--stop'

    @property
    def strikes_node(self) -> bool:
        return self in (self.KILL_NODE, self.LOSE_NODE, self.RETURN_NODE)


GUESTS, LAYOUT, WAIT, REQUEUE = 'guests', 'layout', 'wait', 'requeue'
"""Answers to the loss of a node without a spare, as values of `--when-no-spare`."""


class StagedFault(NamedTuple):
    """One staged failure."""

    action: StagedAction
    target: int
    """A rank, or a node."""
    iteration: int
    """The failure strikes once the last rank has logged this iteration."""

    def __str__(self) -> str:
        return f'{self.action} {self.target}@{self.iteration}'


@dataclass(frozen=True)
class LaunchConfig:
    """One job, by the flags of the launchers. `ConfigurationError` names a bad flag."""

    program: str
    """Path of a Python program, as on the command line."""
    flags: tuple[str, ...] = ()
    nodes: int = 1
    workers_per_node: int = 1
    spares: int = 0
    """Hot spares on each machine: they import the program, and fork or become workers."""
    importable: bool = True
    """Spares may import the program."""
    max_restarts: int = 100
    """Limit of replacements, or of restarts of all workers; the next death ends the job."""
    log_dir: Path | None = None
    """Directory of one log file per rank; None: all output goes to stdout, with the rank."""
    faults: tuple[StagedFault, ...] = ()
    share_gpu: bool = False
    """All workers use the first GPU; to NCCL each worker is a separate host."""
    when_no_spare: str = REQUEUE
    """What happens when a node is lost and no spare is left."""
    layout_after_s: float = math.inf
    """Seconds of guests, after which the job starts again in a layout without them."""
    grow_after_s: float = 300.0
    """Seconds for which a node must be back before a job on fewer nodes takes it."""
    grace_s: float = 10.0
    """Seconds from the first signal to SIGKILL when the job is stopped."""
    launch: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)
    """Id of this launch; prefixes the keys of its processes in the store."""

    def __post_init__(self) -> None:
        _at_least('--nodes', self.nodes, 1)
        _at_least('--workers-per-node', self.workers_per_node, 1)
        _at_least('--spares', self.spares, 0)
        _at_least('--max-restarts', self.max_restarts, 0)
        _at_least('--layout-after', self.layout_after_s, 0)
        _at_least('--grow-after', self.grow_after_s, 0)
        _at_least('--grace', self.grace_s, 0)
        if self.when_no_spare == LAYOUT and 1 not in self.sizes:
            raise ConfigurationError(
                f'--when-no-spare {LAYOUT}: {self.program} reads no windows of other layouts; give '
                f'it {_ELASTIC} {RESTART}, without {_EXACT}.'
            )
        if self.layout_after_s < math.inf and (self.when_no_spare != GUESTS or 1 not in self.sizes):
            raise ConfigurationError(
                f'--layout-after: needs --when-no-spare {GUESTS}, and of {self.program} {_ELASTIC} '
                f'{RESTART}, without {_EXACT}.'
            )
        for fault in self.faults:
            self._check(fault)

    @property
    def world_size(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def sizes(self) -> set[int]:
        """Numbers of nodes that the job may have; 0: it waits for nodes."""
        exact = value_of(self.flags, _EXACT) not in (None, str(False))
        elastic = value_of(self.flags, _ELASTIC) == RESTART and not exact
        if elastic and self.when_no_spare in (GUESTS, LAYOUT):
            return set(range(1, self.nodes + 1))
        return {0, self.nodes} if self.when_no_spare == WAIT else {self.nodes}

    def node_of(self, rank: int) -> int:
        """The node of a rank; nodes hold consecutive ranks, as under torchrun."""
        return rank // self.workers_per_node

    def ranks_of(self, node: int) -> range:
        return range(node * self.workers_per_node, (node + 1) * self.workers_per_node)

    def log_of(self, rank: int) -> Path | None:
        """Log file of a rank; restarts append to it."""
        return None if self.log_dir is None else self.log_dir / f'rank{rank}.log'

    def log_of_spares(self) -> AbstractContextManager[BinaryIO | None]:
        """Open the log file of the hot spares of a machine, if there are logs."""
        return nullcontext() if self.log_dir is None else (self.log_dir / 'spares.log').open('ab')

    def make_log_dir(self) -> None:
        """Create the directory of `--log-dir`, if that flag was given.

        Raises `ConfigurationError` if the directory, or a file in it, cannot be created.
        """
        if self.log_dir is None:
            return
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.log_dir).close()
        except OSError as error:
            raise ConfigurationError(
                f'--log-dir {self.log_dir}: no log can be written there ({error}); give a '
                'directory that can be made or written to.'
            ) from error

    def _check(self, fault: StagedFault) -> None:
        what, count = 'rank', self.world_size
        if fault.action.strikes_node:
            what, count = 'node', self.nodes
        if not 0 <= fault.target < count:
            raise ConfigurationError(
                f'{fault}: there is no {what} {fault.target}; --nodes {self.nodes} '
                f'--workers-per-node {self.workers_per_node} has {what}s 0 to {count - 1}.'
            )


def _at_least(flag: str, value: float, least: int) -> None:
    if value < least:
        raise ConfigurationError(f'{flag} {value} must be at least {least}.')


_ELASTIC, _EXACT = '--sparse-ckpt-elastic', '--sparse-ckpt-elastic-exact'
STORE_FLAG = '--sparse-ckpt-store'
STORE_BACKEND = 'sparse-ckpt-store'
"""Rendezvous backend of torchrun's agents that use the store of that flag."""


def store_address(flags: Sequence[str]) -> tuple[str, int] | None:
    """Host and port of that store, None without the flag; raises as `split_address`."""
    found = value_of(flags, STORE_FLAG)
    return None if found is None else split_address(found)


def split_address(store: str) -> tuple[str, int]:
    """Host and port of HOST:PORT, as `login1:29400` or `[fd00::5]:29400`; `ConfigurationError`."""
    return SparseCheckpointConfig(store=store).store_address


def unnamed_run_id(flags: Sequence[str]) -> str | None:
    """Run id that another job of Slurm must name to find the windows of this one.

    None if the program's `flags` name one, or outside of Slurm.
    """
    return None if value_of(flags, '--sparse-ckpt-run-id') is not None else slurm_run_id()
