# SPDX-License-Identifier: Apache-2.0
"""Recoveries that bring nothing: all processes are alive, and the same iteration fails again.

What says that a peer is lost may be an error of this rank's own: a data server that refuses, a
reader of stdout that is gone, a call that NCCL or gloo does not take. Such recoveries are counted,
by all ranks alike, until an iteration is committed or another window is tried. Recoveries from a
death are left to the launchers, which count those.

After `MOST` of them the rank whose own error came first ends with it, and is replaced; all others
have only heard of that. If this does not help, the whole job starts again, and the rank ends with
its error again: launchers give up a job one of whose ranks fails by itself again and again.
"""

import logging
import time
import traceback
from collections.abc import Callable, Sequence

from moevement_ext.membership.rendezvous import EpochBroken
from moevement_ext.membership.report import Report
from moevement_ext.recover.verdict import Verdict, WholeJob

logger = logging.getLogger(__name__)

MOST = 4
"""One more than an older window is put off for (see `sources.TRIES`)."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 4.0
_POLL_S = 0.02


class Fruitless:
    """Those in a row, as one rank sees them. Training thread only.

    Attributes:
        count: since the newest progress.
    """

    def __init__(self) -> None:
        self.count = 0
        self._error: Exception | None = None

    @property
    def own_error(self) -> bool:
        """An error of this rank, and not the news of another, ended the last epoch."""
        return self._error is not None

    def failed(self, error: Exception, ended_epoch: bool) -> None:
        """This rank has left an epoch.

        Args:
            error: with which its training thread came out.
            ended_epoch: nobody had ended the epoch before.
        """
        self.count += 1
        own = ended_epoch and not isinstance(error, EpochBroken)
        self._error = _without_frames(error) if own else None

    def progressed(self) -> None:
        """An iteration was committed, or another window is to be tried."""
        self.count = 0

    def met(self, reports: Sequence[Report], verdict: Verdict) -> Verdict:
        """All have met.

        Args:
            reports: of all ranks.
            verdict: what follows from them without the count.

        Returns:
            What follows with it.

        Raises:
            Exception: the error of this rank, which is to end with it.
        """
        error, self._error = self._error, None
        survivors = [report.fruitless for report in reports if report.survivor]
        self.count = min(survivors, default=0)
        if len(survivors) < len(reports):  # a process was lost: that is the reason
            self.count = max(self.count - 1, 0)
            return verdict
        blamed = any(report.own_error for report in reports)
        if self.count >= (2 * MOST if blamed else MOST):
            verdict = WholeJob(f'{self.count} recoveries in a row have brought nothing')
        if error is not None and (isinstance(verdict, WholeJob) or self.count == MOST):
            logger.error('sparse checkpointing: this rank ends with its own error: %r', error)
            raise error
        return verdict

    def pause(self, over: Callable[[], bool]) -> None:
        """Let what is the matter pass, if there was more than one in a row.

        Args:
            over: whether there is no reason to wait any more.
        """
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** (self.count - 2), _LAST_PAUSE_S)
        until = time.monotonic() + (pause_s if self.count > 1 else 0.0)
        while time.monotonic() < until and not over():
            time.sleep(_POLL_S)


def _without_frames(error: Exception) -> Exception:
    """The same, with the traceback as text: frames would keep what is to be freed."""
    text = ''.join(traceback.format_exception(error))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    error.add_note(f'It was raised here:\n{text}')
    return error
