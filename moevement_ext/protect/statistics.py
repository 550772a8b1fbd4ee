# SPDX-License-Identifier: Apache-2.0
"""How protection goes: what the log line and the metrics report."""

import logging
from dataclasses import dataclass

from moevement_ext.events import EventLog, ProtectionReduced

logger = logging.getLogger(__name__)


@dataclass
class CaptureStatistics:
    """Figures of one rank; no two threads write the same, but `failures`."""

    events: EventLog
    exposed_s: float = 0.0
    """Seconds by which sparse checkpointing held up training, waits included."""
    iterations: int = 0
    """Iterations that came to their update."""
    slot_bytes: int = 0
    """Payload of the newest slot."""
    skipped_windows: int = 0
    """Windows for which there was no free file."""
    failures: int = 0
    """How often protection was reduced."""
    persisted: int | None = None
    """Start of the newest window that every rank and its holders have."""

    def degraded(self, reason: str) -> None:
        """Note that protection is reduced. Called by any thread."""
        logger.warning('sparse checkpointing: protection is reduced: %s', reason)
        self.failures += 1
        self.events.emit(ProtectionReduced(reason=reason))
