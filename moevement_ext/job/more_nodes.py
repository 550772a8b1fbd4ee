# SPDX-License-Identifier: Apache-2.0
"""Waits for more nodes, or requests another start, if the job cannot continue with its nodes.

`torchrun --nnodes MIN:MAX` restarts all workers when a node joins, so the workers only have to
wait. The launchers of this package, and Slurm, start a job with a fixed number of nodes: the job
reports to them how many ranks it needs. Under a `torchrun` that can get no more nodes, the job ends
with the error.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import psutil
from torch.distributed import DistError

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.job.ending import announce
from moevement_ext.logger import logger_of
from moevement_ext.membership.mailbox import write_needed_ranks
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.recover.reshard.found import NodesMissing
from moevement_ext.system.leaving import ASKING, end_at_once
from moevement_ext.system.watchdog import under_torchrun

logger = logger_of(__name__)

_NODES = '--nnodes'
_NODES_VARIABLE = 'PET_NNODES'
_STORE_TIMEOUT = timedelta(seconds=10)
_LOOKS_FOR_ITS_LAUNCHER_S = 2.0


def without_nodes(rank: Rank, missing: NodesMissing) -> None:
    """Wait for more nodes if some may join; returns if the job must end with the error.

    Collective. The limit of the wait is that of a rendezvous. If a larger number of ranks would
    suffice, the job ends with `EXIT_WHOLE_JOB`: after the wait, or at once under a launcher with a
    fixed number of nodes.
    """
    may_come = nodes_may_come() if rank.number == 0 else False
    may_come = rank.exchange('more-nodes', b'1' if may_come else b'0')[0] == b'1'
    if may_come:
        _wait(rank, missing)
    elif under_torchrun():
        return
    if missing.ranks:
        _end(rank, missing)


def nodes_may_come() -> bool:
    """True if this launch may get more nodes."""
    if not under_torchrun():
        return False
    nodes = os.environ.get('GROUP_WORLD_SIZE', '0')
    return int(nodes) < _most_nodes(_command_lines(), os.environ.get(_NODES_VARIABLE))


def _most_nodes(command_lines: Sequence[Sequence[str]], variable: str | None) -> int:
    """Maximum number of nodes of torchrun; 0 if it is not given.

    `command_lines` are those of this process's parents, the nearest first; `variable` is the value
    of torchrun's environment variable for `--nnodes`.
    """
    for command in command_lines:
        for flag, value in zip(command, [*command[1:], ''], strict=True):
            if flag.startswith(f'{_NODES}='):
                value = flag.partition('=')[2]
            elif flag != _NODES:
                continue
            return _most(value)
    return _most(variable or '')


def _most(nodes: str) -> int:
    found = re.fullmatch(r'(?:\d+:)?(\d+)', nodes)
    return int(found[1]) if found else 0


def _command_lines() -> list[list[str]]:
    found = []
    with suppress(psutil.Error):
        found = [parent.cmdline() for parent in psutil.Process().parents()]
    return found


def _wait(rank: Rank, missing: NodesMissing) -> None:
    """Wait until torchrun ends this process because of a new node, or the limit has passed."""
    limit = rank.exchange.timeout
    if rank.number == 0:
        print(
            f' sparse ckpt | waits up to {limit.total_seconds() / 60:g} minutes for more nodes | '
            f'{missing} |',
            flush=True,
        )
    _listen_to_signals()
    launcher, deadline = os.getppid(), time.monotonic() + limit.total_seconds()
    while os.getppid() == launcher and time.monotonic() < deadline:
        time.sleep(_LOOKS_FOR_ITS_LAUNCHER_S)


def _listen_to_signals() -> None:
    """Let signals end this process: handlers act after an iteration, and none runs."""
    if threading.current_thread() is threading.main_thread():
        for number in ASKING:
            signal.signal(number, signal.SIG_DFL)


def _end(rank: Rank, missing: NodesMissing) -> None:
    """End the launcher, too, so that the program that started it can try again."""
    if rank.number == 0:
        logger.error('the job ends, to be started again: %s', missing)
        with suppress(DistError):  # the launcher may be gone
            store = launcher_store(_STORE_TIMEOUT)
            if store is not None:
                write_needed_ranks(store, missing.ranks)
    rank.exchange('job-ends', b'')  # rank 0 may serve the store
    announce(rank.number, EXIT_WHOLE_JOB)
    end_at_once(EXIT_WHOLE_JOB)
