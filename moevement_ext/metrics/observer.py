# SPDX-License-Identifier: Apache-2.0
"""Turns events and figures of this rank into values of instruments."""

import logging
import threading
from collections.abc import Callable, Sequence

from moevement_ext.events import (
    DeviceProblem,
    Event,
    FailureDetected,
    Finished,
    LossLogged,
    NextTier,
    ProtectionReduced,
    Recovered,
    WindowCommitted,
    WindowOnDisk,
    WindowPersisted,
)
from moevement_ext.metrics import instruments as of
from moevement_ext.metrics.instruments import Instrument, Recorder
from moevement_ext.protect.statistics import Figures

logger = logging.getLogger(__name__)

_PERIOD_S = 1.0


class Observer:
    """Records what happens on this rank, and once a second how its protection goes.

    Nothing of it runs on the training thread but the count of a rare event, and no error of it
    reaches training (invariant I6).

    Args:
        recorders: where values go.
    """

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = recorders
        self._committed: int | None = None
        self._before = Figures()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        for instrument in of.INSTRUMENTS:
            if instrument.kind is of.Kind.COUNTER and instrument.label is None:
                self._add(instrument, 0)  # of what begins at 1, a rate misses the first one

    def event(self, event: Event) -> None:
        """Count one event. Called by any thread."""
        try:
            self._count(event)
        except Exception:
            logger.exception('an event is missing in the metrics')

    def watch(self, figures: Callable[[], Figures]) -> None:
        """Look at these figures once a second from now on, on a thread."""
        self._thread = threading.Thread(
            target=self._look_again_and_again, args=(figures,), name='metrics', daemon=True
        )
        self._thread.start()

    def aim(self, iteration: int) -> None:
        """Training is to end at this iteration. Called by the training thread, once."""
        self._set(of.TARGET, iteration)
        self._set(of.FINISHED, 0)

    def close(self) -> None:
        """Look a last time; nothing is recorded any more."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        for recorder in self._recorders:
            try:
                recorder.close()
            except Exception:
                logger.exception('the last metrics may be missing')

    def _count(self, event: Event) -> None:
        match event:
            case LossLogged():
                self._set(of.LOSS, event.loss)
            case WindowCommitted():
                self._committed = event.start
                self._add(of.COMMITTED)
            case WindowPersisted():
                self._add(of.PERSISTED)
            case WindowOnDisk():
                self._add(of.ON_DISK)
            case ProtectionReduced():
                self._add(of.REDUCED)
            case FailureDetected():
                self._add(of.FAILURES)
            case Finished():
                self._set(of.FINISHED, 1)
            case DeviceProblem():
                self._add(of.DEVICE_PROBLEMS, 1, event.harm)
            case NextTier():
                self._add(of.NEXT_TIER, 1, event.tier)
            case Recovered():
                self._add(of.RECOVERIES, 1, 'localized' if event.localized else 'whole-job')
                self._add(of.REPLAYED, event.replayed)
                self._add(of.VERIFIED, event.verified)
                self._add(of.DIFFERING, len(event.differing))
                for phase, seconds in event.seconds.items():
                    self._add(of.RECOVERY, seconds, phase)

    def _look_again_and_again(self, figures: Callable[[], Figures]) -> None:
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(_PERIOD_S)
            try:
                self._look(figures())
            except Exception:
                logger.exception('metrics')

    def _look(self, now: Figures) -> None:
        before, self._before = self._before, now
        self._add(of.TRAINING, now.training_s - before.training_s)
        self._add(of.EXPOSED, now.exposed_s - before.exposed_s)
        self._add(of.ITERATIONS, now.iterations - before.iterations)
        self._add(of.CAPTURED, now.captured_bytes - before.captured_bytes)
        self._add(of.SKIPPED, now.skipped_windows - before.skipped_windows)
        self._set(of.ITERATION, now.iteration)
        self._set(of.WINDOW, now.window)
        self._set(of.SLOT_BYTES, now.slot_bytes)
        for kind, size in now.host_memory.items():
            self._set(of.HOST_MEMORY, size, kind)
        if now.disk_bytes is not None:
            self._set(of.DISK, now.disk_bytes)
        if now.copy_bytes_per_s is not None:
            self._set(of.COPY_RATE, now.copy_bytes_per_s)
        if now.persisted is not None:
            # A rank that joins knows what is persisted before it has come so far.
            self._set(of.WINDOW_AGE, max(now.iteration - now.persisted, 0))
            if self._committed is not None:
                self._set(of.REPLICATION_LAG, max(self._committed - now.persisted, 0))

    def _add(self, instrument: Instrument, amount: float = 1, label: str | None = None) -> None:
        for recorder in self._recorders:
            recorder.add(instrument, amount, label)

    def _set(self, instrument: Instrument, value: float, label: str | None = None) -> None:
        for recorder in self._recorders:
            recorder.set(instrument, value, label)
