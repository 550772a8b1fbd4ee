# SPDX-License-Identifier: Apache-2.0
"""Where a fault landed, out of the events, and how many in each phase."""

import pytest

from moevement_ext.events import Event, FailureDetected, RecoveryPhase, WindowPersisted
from tests.unit.tools.samples import happened
from tools.chaos.results import Cell, Phase, landed, landing_table
from tools.lab.job import Kind

pytestmark = pytest.mark.timed


def phase(rank: int, name: str, time: float, pid: int | None = None) -> Event:
    return happened(RecoveryPhase, rank, time, pid, phase=name)


class TestLanding:
    FIRST = 100.0
    EVENTS = [
        *(phase(rank, 'over', 90.0) for rank in (0, 1)),
        happened(WindowPersisted, 0, 95.0),
        phase(0, 'detect', 100.1),
        happened(FailureDetected, 0, 100.2),
        phase(0, 'meet', 100.2),
        phase(2, 'respawn', 103.0, 99),
        phase(2, 'regroup', 103.1, 99),
        phase(2, 'fetch', 103.2, 99),
    ]

    @pytest.mark.parametrize(
        ('pid', 'at', 'expected'),
        [
            (10, 100.5, Phase.MEET),
            (99, 103.3, Phase.FETCH),
            (11, 100.05, Phase.UNNOTICED),
            (11, 100.15, Phase.DETECT),
            (12, 101.0, Phase.MEET),
        ],
        ids=[
            'survivor',
            'replacement',
            'nobody noticed',
            'others noticed',
            'new and still importing',
        ],
    )
    def test_second_fault_lands_in_the_phase_of_its_victim(
        self, pid: int, at: float, expected: Phase
    ) -> None:
        assert landed(self.EVENTS, self.FIRST, at, pid) is expected

    def test_first_fault_lands_in_training(self) -> None:
        assert landed(self.EVENTS[:3], None, 99.0, 10) is Phase.TRAINING
        assert landed([], None, 99.0, 10) is Phase.TRAINING


def test_table_counts_faults_by_phase_and_kind() -> None:
    cells = [Cell(Phase.MEET, Kind.KILL), Cell(Phase.MEET, Kind.NODE)]
    counted = landing_table([*cells, cells[0]])
    columns = {column.header: list(column.cells) for column in counted.columns}
    meet = columns['phase'].index(Phase.MEET)
    assert [columns[kind][meet] for kind in (Kind.KILL, Kind.NODE, Kind.STOP)] == ['2', '1', '']
