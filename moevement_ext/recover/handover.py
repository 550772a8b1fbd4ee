# SPDX-License-Identifier: Apache-2.0
"""What survivors tell a new process besides what all ranks report."""

from collections.abc import Sequence

import msgspec

from moevement_ext.membership.report import Report


class PlanInForce(msgspec.Struct, frozen=True):
    """A plan by reference: with the shares of thousands of experts it would be most of a report."""

    version: int
    origin: int
    """Where its windows begin now; that of the plan, unless they were begun anew."""


class Handover(msgspec.Struct, frozen=True):
    """What survivors tell a new process besides their report."""

    plan: PlanInForce
    """At the survivor's iteration."""
    trainer: bytes
    """What `Loop.hand_over` returned there."""


def handovers(reports: Sequence[Report]) -> list[Handover]:
    """What the survivors hand over."""
    return [
        msgspec.msgpack.decode(report.details, type=Handover)
        for report in reports
        if report.details
    ]
