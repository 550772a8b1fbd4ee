# SPDX-License-Identifier: Apache-2.0
"""Tells a rank's own errors from the loss of another rank, and counts useless recoveries.

In those all processes are alive, and the same iteration fails again.

An error that looks like a lost peer may be this rank's own: a data server that refuses, a dead
reader of stdout, a call that NCCL or gloo rejects. All ranks count such recoveries alike, until an
iteration is committed or another window is tried. The launchers count recoveries from a death.

After `MOST` recoveries (`MOST_WITHOUT_MEMORY` if its GPU is full) the rank whose own error came
first ends with this error and is replaced; the other ranks only reacted to its announcement. If
this does not help, the whole job restarts, and the rank ends with its error again, until the
launcher gives up the job.
"""

import re
import time
import traceback
from collections.abc import Callable, Sequence

from torch.distributed import DistError

from moevement_ext.logger import logger_of
from moevement_ext.membership.rendezvous import RoundEnded
from moevement_ext.membership.report import Report
from moevement_ext.recover.verdict import Verdict, WholeJob
from moevement_ext.regroup.process_groups import RegroupError
from moevement_ext.replicate.client import ReaderClosed

logger = logger_of(__name__)

MOST = 4
"""One more than the tries before an older window (see `name.TRIES`)."""

MOST_WITHOUT_MEMORY = 2
"""Lower, as unused GPU memory is freed before each recovery: only a new process can free more."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 4.0
_POLL_S = 0.02


class Fruitless:
    """Useless recoveries (`count`) since the last progress, on one rank. Training thread only."""

    def __init__(self) -> None:
        self.count = 0
        self._between_steps = 0  # own errors there, on which no progress depends
        self._error: Exception | None = None

    @property
    def own_error(self) -> bool:
        """True if this rank's own error, not another rank's announcement, ended the last round."""
        return self._error is not None

    def failed(self, error: Exception, ended_round: bool, between_steps: bool = False) -> None:
        """Record that this rank has left a round because of the training thread's error.

        `ended_round`: no rank had ended the round before.
        """
        self.count += 1
        own = ended_round and not isinstance(error, RoundEnded)
        self._between_steps += own and between_steps
        self._error = _without_frames(error) if own else None

    def progressed(self) -> None:
        """Reset the count: an iteration was committed, or another window is tried next."""
        self.count = 0

    def met(self, reports: Sequence[Report], verdict: Verdict) -> Verdict:
        """Count the recovery, after a rendezvous of all ranks, and return the corrected verdict.

        Raises this rank's own error if the rank must end.
        """
        error, self._error = self._error, None
        survivors = [report for report in reports if report.survivor]
        # A replay that goes on counts nothing, and may wait for the failing rank at its end.
        left = (report.fruitless for report in survivors if report.under_way is None)
        self.count = min(left, default=0)
        if len(survivors) < len(reports):  # a lost process is the reason
            self.count, self._between_steps = max(self.count - 1, 0), 0
            return verdict
        blamed = any(report.own_error for report in reports)
        if self.count >= (2 * MOST if blamed else MOST):
            verdict = WholeJob(f'{self.count} recoveries in a row have brought nothing')
        full = error is not None and no_gpu_memory(error) and self.count >= MOST_WITHOUT_MEMORY
        often = self.count == MOST or self._between_steps >= MOST
        if error is not None and (isinstance(verdict, WholeJob) or often or full):
            text = in_words(error) if full else repr(error)
            logger.error('this rank ends with its own error: %s', text)
            raise error
        return verdict

    def pause(self, over: Callable[[], bool]) -> None:
        """Pause until `over`, after several useless recoveries, for a transient cause to pass."""
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** (self.count - 2), _LAST_PAUSE_S)
        until = time.monotonic() + (pause_s if self.count > 1 else 0.0)
        while time.monotonic() < until and not over():
            time.sleep(_POLL_S)


def _without_frames(error: Exception) -> Exception:
    """The error with its traceback as text, as frames would keep objects alive."""
    text = ''.join(traceback.format_exception(error))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    error.add_note(f'It was raised here:\n{text}')
    return error


_PLACE_IN_GLOO = re.compile(r'^\[[^\]]*\.(?:cc|h):\d+\]\s*')
_ADVICE_OF_GLOO = re.compile(
    r'\s*This (?:is probably due|may be|could be)\b.*|\s*GLHF!.*', re.DOTALL
)
# The line of NCCL's last error that torch quotes: CUDA's words, or NCCL's own after them.
_NO_MEMORY = re.compile('.*(?:out of memory|Failed to CUDA [cm]alloc).*')
_LONGEST = 300


def in_words(error: BaseException) -> str:
    """Format an exception for the log; a lost connection is no defect of the program.

    Gloo's source locations and advice are removed, and all that NCCL adds to a lack of memory.
    """
    lines = str(error).splitlines() or ['no reason given']
    if full := no_gpu_memory(error):
        lines = [f'no GPU memory for a communicator: {full}']
    text = _ADVICE_OF_GLOO.sub('', _PLACE_IN_GLOO.sub('', lines[0]))
    text = ''.join(letter for letter in text if letter.isprintable() and ord(letter) < 0xE000)
    text = text.strip()[:_LONGEST]
    if isinstance(error, RuntimeError) and 'gloo' in str(error).lower():
        return f'the connection to another rank is lost (gloo: {text})'
    return f'{type(error).__name__}: {text}'


def lost_peer(error: BaseException) -> bool:
    """Return True if an exception results from the loss of another rank, not from an own fault.

    gloo names its transport in every message. NCCL, the stores, and the clients that fetch
    windows and logs raise exceptions of specific types.
    """
    known = RoundEnded | RegroupError | DistError | ConnectionError | ReaderClosed
    if isinstance(error, known):
        return True
    return isinstance(error, RuntimeError) and 'gloo' in str(error).lower()


def no_gpu_memory(error: BaseException) -> str:
    """NCCL's words if it had no memory for a communicator, in `renew` or an operation; else ''."""
    found = isinstance(error, RegroupError | DistError) and _NO_MEMORY.search(str(error))
    return found[0] if found else ''
