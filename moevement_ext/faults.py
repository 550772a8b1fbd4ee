# SPDX-License-Identifier: Apache-2.0
"""Fault points: places in the code where a process can kill itself for a test.

`MOEVEMENT_FAIL_AT=<rank>:<iteration>:<phase>[:<attempt>]` selects a fault point; commas separate
several. The death is real (SIGKILL), for tests and demonstrations, and the log announces it.
`attempt` counts the starts of the job (`TORCHELASTIC_RESTART_COUNT`), 0 by default. Without the
variable every call is one comparison.

`MOEVEMENT_STALL_FILE=<path>`: loading of a micro-batch blocks while the file `<path>.<process id>`
exists, like a loader with a hung file system.
"""

import logging
import os
import re
import signal
import time
from dataclasses import dataclass
from enum import StrEnum

from moevement_ext.config import ConfigurationError

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    """Places where a process can die, named after the code at each call of `point`."""

    # An iteration
    FORWARD = 'forward'
    BACKWARD = 'backward'
    P2P = 'p2p'
    REDUCE = 'reduce'
    OPTIMIZER = 'optimizer'
    NORM = 'norm'
    STEP = 'step'
    """One of several optimizers has stepped."""
    AFTER_STEP = 'after-step'
    # Capture of the iteration
    CAPTURE = 'capture'
    SEAL = 'seal'
    REPLICATE = 'replicate'
    # Between two iterations
    EVALUATE = 'evaluate'
    EVALUATE_FORWARD = 'evaluate-forward'
    EVALUATED = 'evaluated'
    SAVE = 'save'
    SAVED = 'saved'
    EXIT = 'exit'
    """Training has ended as planned, before its last iteration."""
    # A recovery
    DETECT = 'detect'
    REGROUP = 'regroup'
    CONNECT = 'connect'
    FETCH = 'fetch'
    RELAY = 'relay'
    """A slot of another layout's window is put together."""
    LOAD = 'load'
    CONVERT = 'convert'
    CATCH_UP = 'catch-up'
    REPLAYED = 'replayed'
    RESUME = 'resume'


@dataclass(frozen=True)
class Fault:
    """The place where this process dies."""

    iteration: int
    phase: Phase


_FAULT = re.compile(rf'(\d+):(\d+):({"|".join(Phase)})(?::(\d+))?')
_STALL_POLL_S = 0.05

_armed: list[Fault] = []
_stall_file = os.environ.get('MOEVEMENT_STALL_FILE')
_iteration = 0


def arm(rank: int) -> None:
    """Read the environment, and warn in the log of every fault of this process.

    Called once by each worker, on its training thread.

    Args:
        rank: global rank of this process.

    Raises:
        ConfigurationError: the variable is malformed.
    """
    attempt = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
    for text in filter(None, os.environ.get('MOEVEMENT_FAIL_AT', '').split(',')):
        match = _FAULT.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f'MOEVEMENT_FAIL_AT={text!r}: expected <rank>:<iteration>:<phase>[:<attempt>] '
                f'with a phase of {", ".join(Phase)}'
            )
        victim, iteration, phase, attempt_of_victim = match.groups('0')
        if int(victim) == rank and attempt_of_victim == attempt:
            _armed.append(Fault(int(iteration), Phase(phase)))
            logger.warning(
                'MOEVEMENT_FAIL_AT: rank %d kills itself in iteration %s, phase %s',
                rank,
                iteration,
                phase,
            )


def at_iteration(iteration: int) -> None:
    """Record the current iteration. Training thread."""
    global _iteration
    _iteration = iteration


def armed() -> bool:
    """True if this process has a fault point."""
    return bool(_armed)


def point(phase: Phase) -> None:
    """Die here if this fault point is selected. Any thread."""
    if _armed and Fault(_iteration, phase) in _armed:
        os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    """Block while the stall file exists. Training thread, before it loads data."""
    while _stall_file is not None and os.path.exists(f'{_stall_file}.{os.getpid()}'):
        time.sleep(_STALL_POLL_S)
