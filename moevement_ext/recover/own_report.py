# SPDX-License-Identifier: Apache-2.0
"""A survivor's report for the rendezvous after a failure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from moevement_ext.config import is_guest, node_name
from moevement_ext.membership.mailbox import own_launch, own_process
from moevement_ext.membership.membership import Membership
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.report import NOWHERE, Report, UnderWay
from moevement_ext.memory.window.name import Window
from moevement_ext.plan.strategy.choice import only_source
from moevement_ext.protect.protection import Protection
from moevement_ext.recover.fruitless import Fruitless
from moevement_ext.recover.inventory import held_windows, launch_of
from moevement_ext.recover.rank_state import RankState
from moevement_ext.recover.trainer import Trainer


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


@dataclass(eq=False)
class OwnReport:
    """Reports of one rank. Training thread only, except the result of `of_replay`."""

    _rank: Rank
    _membership: Membership
    _trainer: Trainer
    _protection: Protection
    _position: RankState
    _fruitless: Fruitless

    def __post_init__(self) -> None:
        rank = self._rank
        self._launched = launch_of(rank.identity)
        self._only_on = only_source(rank.config, rank.run_id, rank.number)

    def now(self, refused: Sequence[Window], other_bits: str = '') -> Report:
        """Report of a training thread that has left its round; `refused` windows are damaged."""
        memory, identity = self._protection.memory, self._rank.identity
        first_logged = memory.log.first_iteration if memory.log is not None else None
        present = self._protection.checkpointer.schedule
        handover = Handover(present.version, present.origin, self._trainer.loop.hand_over())
        return Report(
            survivor=True,
            node=node_name(),
            guest=is_guest(),
            process=own_process(),
            windows=held_windows(memory.store, identity, self._only_on),
            launched=self._launched,
            origin=self._membership.origin,
            committed=self._position.committed,
            clean_at=self._position.clean_at,
            first_logged=NOWHERE if first_logged is None else first_logged,
            refused=list(refused),
            other_bits=other_bits,
            address=memory.addresses[self._rank.number],
            coordinator=self._protection.persistence.coordinator,
            fruitless=self._fruitless.count,
            own_error=self._fruitless.own_error,
            details=msgspec.msgpack.encode(handover),
            launch=own_launch(),
            marks=[memory.mark],
            history=self._protection.checkpointer.history,
        )

    def of_replay(
        self, window: Window, target: int, refused: Sequence[Window]
    ) -> Callable[[], Report]:
        """Return a function for another thread that reports this rank's replay up to `target`."""
        under_way = UnderWay(window, target, self._membership.taken.round)
        before = msgspec.structs.replace(self.now(refused), under_way=under_way)
        store, identity = self._protection.memory.store, self._rank.identity

        def report() -> Report:
            self._protection.persistence.leave()
            windows = held_windows(store, identity, self._only_on)
            return msgspec.structs.replace(before, windows=windows)

        return report
