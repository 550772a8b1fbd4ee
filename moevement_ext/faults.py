# SPDX-License-Identifier: Apache-2.0
"""Fault points: places of the product where a process can be made to kill itself.

`MOEVEMENT_FAIL_AT=<rank>:<iteration>:<phase>[:<life>]` names one; several are separated by commas.
Real process death (SIGKILL), for tests and demonstrations, and announced in the log. `life` counts
the starts of the job (`TORCHELASTIC_RESTART_COUNT`), 0 by default. Without the variable every call
is one comparison.

`MOEVEMENT_STALL_FILE=<path>`: loading of a micro-batch waits as long as there is a file
`<path>.<process id>`, as a loader does whose file system hangs.
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
    """Where a process can die: `point(Phase.SEAL)` stands at the place that the name tells."""

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
    # What is kept of it
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
    LOAD = 'load'
    CONVERT = 'convert'
    CATCH_UP = 'catch-up'
    REPLAYED = 'replayed'
    RESUME = 'resume'


@dataclass(frozen=True)
class Fault:
    """Where this process is to die."""

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
    life = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
    for text in filter(None, os.environ.get('MOEVEMENT_FAIL_AT', '').split(',')):
        match = _FAULT.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f'MOEVEMENT_FAIL_AT={text!r}: expected <rank>:<iteration>:<phase>[:<life>] '
                f'with a phase of {", ".join(Phase)}'
            )
        victim, iteration, phase, life_of_victim = match.groups('0')
        if int(victim) == rank and life_of_victim == life:
            _armed.append(Fault(int(iteration), Phase(phase)))
            logger.warning(
                'MOEVEMENT_FAIL_AT: rank %d kills itself in iteration %s, phase %s',
                rank,
                iteration,
                phase,
            )


def at_iteration(iteration: int) -> None:
    """Note the iteration that begins; called by the training thread."""
    global _iteration
    _iteration = iteration


def armed() -> bool:
    """True if this process is to die somewhere."""
    return bool(_armed)


def point(phase: Phase) -> None:
    """Die here if asked to. Called on any thread."""
    if _armed and Fault(_iteration, phase) in _armed:
        os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    """Wait here as long as asked to. Called by the training thread before it loads."""
    while _stall_file is not None and os.path.exists(f'{_stall_file}.{os.getpid()}'):
        time.sleep(_STALL_POLL_S)
