# SPDX-License-Identifier: Apache-2.0
"""Fault points: code locations at which a process can kill itself for a test.

`MOEVEMENT_FAIL_AT=<rank>:<iteration>:<phase>[:<attempt>]` selects a fault point; commas separate
several. The process kills itself with SIGKILL; a warning in the log names each fault at the start.
`attempt` is the run attempt (`TORCHELASTIC_RESTART_COUNT`), 0 by default. Without the variable a
fault point costs one comparison.

`MOEVEMENT_STALL_FILE=<path>`: loading of a micro-batch blocks while the file `<path>.<process id>`
exists, like a loader with a hung file system.
"""

import os
import re
import signal
import time
from dataclasses import dataclass
from enum import StrEnum

from moevement_ext.config import ConfigurationError
from moevement_ext.logger import logger_of

logger = logger_of(__name__)


class Phase(StrEnum):
    """Fault points, named after the code around each call of `point`."""

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
    RESHARD = 'reshard'
    """A slot is assembled from the windows of another layout."""
    LOAD = 'load'
    CONVERT = 'convert'
    CATCH_UP = 'catch-up'
    REPLAYED = 'replayed'
    RESUME = 'resume'


@dataclass(frozen=True)
class Fault:
    """The fault point at which this process kills itself."""

    iteration: int
    phase: Phase


_FAULT = re.compile(rf'(\d+):(\d+):({"|".join(Phase)})(?::(\d+))?')
_STALL_POLL_S = 0.05

_armed: list[Fault] = []
_iteration = 0


def arm(rank: int) -> None:
    """Read the faults of this process from the environment, and log a warning for each.

    Called once by each worker, on its training thread. Raises `ConfigurationError` if the
    variable is malformed.
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
    global _iteration
    _iteration = iteration


def armed() -> bool:
    """True if this process has a fault point."""
    return bool(_armed)


def point(phase: Phase) -> None:
    """Kill this process if this fault point is selected. Any thread."""
    if _armed and Fault(_iteration, phase) in _armed:
        os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    """Block while the stall file exists. Training thread, before it loads data."""
    file = os.environ.get('MOEVEMENT_STALL_FILE')
    while file is not None and os.path.exists(f'{file}.{os.getpid()}'):
        time.sleep(_STALL_POLL_S)
