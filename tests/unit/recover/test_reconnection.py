# SPDX-License-Identifier: Apache-2.0
"""All ranks agree about the connected ranks at the end of a replay, whenever replays began."""

from itertools import product

import pytest

from moevement_ext.membership.report import Report, UnderWay
from moevement_ext.memory.window.name import Window, WindowName
from moevement_ext.recover.reconnection import connected_with
from moevement_ext.recover.verdict import Localized

WINDOW = Window(WindowName(6, 'plan'), 3)
WAITS, BEGINS = 'waits', 'begins'
OF_RANK = (WAITS, BEGINS, 4, 5)
"""What a rank does; a number: it goes on, connected since that round."""


def job(does: tuple[str | int, ...]) -> tuple[Localized, list[Report]]:
    going_on = frozenset(rank for rank, what in enumerate(does) if isinstance(what, int))
    replays = going_on | {rank for rank, what in enumerate(does) if what == BEGINS}
    verdict = Localized(9, frozenset(), replays, frozenset(), WINDOW, going_on=going_on)
    reports = [
        Report(
            survivor=True,
            node='node',
            process=1,
            windows=[],
            under_way=UnderWay(WINDOW, 9, what) if isinstance(what, int) else None,
        )
        for what in does
    ]
    return verdict, reports


@pytest.mark.parametrize('ranks', [1, 2, 3, 4])
def test_connected_sets_partition_the_ranks(ranks: int) -> None:
    for does in product(OF_RANK, repeat=ranks):
        verdict, reports = job(does)
        found = [connected_with(rank, verdict, reports) for rank in range(ranks)]
        for rank, others in enumerate(found):
            assert rank in others
            assert {does[other] for other in others} == {does[rank]}
            assert all(found[other] == others for other in others)
