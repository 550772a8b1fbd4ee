# SPDX-License-Identifier: Apache-2.0
"""Kills the process at a chosen place: `MOEVEMENT_FAIL_AT=<rank>:<iteration>:<phase>[:<life>]`.

Real process death (SIGKILL), for tests and demonstrations. Several faults are separated by commas.
`life` counts the starts of the job (`TORCHELASTIC_RESTART_COUNT`), 0 by default. Without the
variable every call is one comparison.

`MOEVEMENT_STALL_FILE=<path>`: loading of a micro-batch waits as long as there is a file
`<path>.<process id>`, as a loader does whose file system hangs.
"""

import os
import re
import signal
import time
from dataclasses import dataclass

PHASES = (
    'forward', 'backward', 'p2p', 'reduce', 'optimizer', 'norm', 'step', 'after-step',
    'capture', 'seal', 'replicate', 'evaluate', 'evaluate-forward', 'evaluated', 'save', 'saved',
    'detect', 'regroup', 'connect', 'fetch', 'load', 'convert', 'catch-up', 'replayed', 'resume',
)  # fmt: skip

_FAULT = re.compile(rf'(\d+):(\d+):({"|".join(PHASES)})(?::(\d+))?')


@dataclass(frozen=True)
class Fault:
    """Where the process is to die."""

    iteration: int
    phase: str


_STALL_POLL_S = 0.05

_armed: list[Fault] = []
_stall_file = os.environ.get('MOEVEMENT_STALL_FILE')
_iteration = 0


def arm(rank: int) -> None:
    """Read the environment; called once by each worker.

    Raises:
        ValueError: the variable is malformed.
    """
    life = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
    for text in filter(None, os.environ.get('MOEVEMENT_FAIL_AT', '').split(',')):
        match = _FAULT.fullmatch(text)
        if match is None:
            raise ValueError(
                f'MOEVEMENT_FAIL_AT={text!r}: expected <rank>:<iteration>:<phase>[:<life>] '
                f'with a phase of {", ".join(PHASES)}'
            )
        victim, iteration, phase, life_of_victim = match.groups('0')
        if int(victim) == rank and life_of_victim == life:
            _armed.append(Fault(int(iteration), phase))


def at_iteration(iteration: int) -> None:
    """Note the iteration that begins; called by the training thread."""
    global _iteration
    _iteration = iteration


def armed() -> bool:
    """True if this process is to die somewhere."""
    return bool(_armed)


def point(phase: str) -> None:
    """Die here if asked to. Called on any thread."""
    if _armed and Fault(_iteration, phase) in _armed:
        os.kill(os.getpid(), signal.SIGKILL)


def stall() -> None:
    """Wait here as long as asked to. Called by the training thread before it loads."""
    while _stall_file is not None and os.path.exists(f'{_stall_file}.{os.getpid()}'):
        time.sleep(_STALL_POLL_S)
