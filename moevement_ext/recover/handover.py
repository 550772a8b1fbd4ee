# SPDX-License-Identifier: Apache-2.0
"""Survivors' data for a new process, beyond the reports of all ranks."""

from collections.abc import Sequence

import msgspec

from moevement_ext.membership.report import Report


class Handover(msgspec.Struct, frozen=True):
    """A survivor's data for a new process, beyond its report."""

    version: int
    """The plan at the survivor's iteration, by reference: it may name thousands of experts."""
    origin: int
    """Current origin of its windows: the plan's origin, or a later one after `begin_window`."""
    trainer: bytes
    """Result of `Loop.hand_over` on the survivor."""


_HANDOVER = msgspec.msgpack.Decoder(Handover)


def handovers(reports: Sequence[Report]) -> list[Handover]:
    return [_HANDOVER.decode(report.details) for report in reports if report.details]
