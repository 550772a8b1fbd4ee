# SPDX-License-Identifier: Apache-2.0
"""Waits for nodes, or asks for another start, if the job cannot continue with the nodes it has.

`torchrun --nnodes MIN:MAX` restarts all workers when a node joins, so they only have to be there.
Launchers of this package, and Slurm, start a job with a fixed number of nodes: they are told how
many ranks it needs. A `torchrun` that can get no more nodes gets the error.
"""

import logging
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
from moevement_ext.launch.statements import tell_needed
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.recover.relayout.found import NodesMissing
from moevement_ext.system.exit_signal import ASKING
from moevement_ext.system.leaving import end_at_once
from moevement_ext.system.watchdog import under_torchrun

logger = logging.getLogger(__name__)

_NODES = '--nnodes'
_NODES_VARIABLE = 'PET_NNODES'
_STORE_TIMEOUT = timedelta(seconds=10)
_LOOKS_FOR_ITS_LAUNCHER_S = 2.0


def without_nodes(rank: Rank, missing: NodesMissing) -> None:
    """Wait for nodes if some may come; returns if the job shall end with the error. Collective.

    The wait has the limit of the ranks' wait for each other. A job that needs ranks ends with
    `EXIT_WHOLE_JOB` after it, and at once where it cannot wait.
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
    """True if this launch can get nodes that it does not have."""
    if not under_torchrun():
        return False
    nodes = os.environ.get('GROUP_WORLD_SIZE', '0')
    return int(nodes) < _most_nodes(_command_lines(), os.environ.get(_NODES_VARIABLE))


def _most_nodes(command_lines: Sequence[Sequence[str]], variable: str | None) -> int:
    """Largest number of nodes of torchrun; 0 if it does not say.

    `command_lines` are those of this process's parents, the nearest first; `variable` is torchrun's
    `--nnodes` as a variable.
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
    """Let signals end this process: there is no iteration after which a handler would act."""
    if threading.current_thread() is threading.main_thread():
        for number in ASKING:
            signal.signal(number, signal.SIG_DFL)


def _end(rank: Rank, missing: NodesMissing) -> None:
    """Have the launcher end, too, so that what started it tries again."""
    if rank.number == 0:
        logger.error('sparse checkpointing: the job ends, to be started again: %s', missing)
        with suppress(DistError):  # the launcher may be gone
            store = launcher_store(_STORE_TIMEOUT)
            if store is not None:
                tell_needed(store, missing.ranks)
    rank.exchange('job-ends', b'')  # rank 0 may have the store
    announce(rank.number, EXIT_WHOLE_JOB)
    end_at_once(EXIT_WHOLE_JOB)
