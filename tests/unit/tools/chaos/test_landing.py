# SPDX-License-Identifier: Apache-2.0
"""Where a fault landed, out of the events, and what was covered."""

import pytest

from moevement_ext.events import Event, FailureDetected, RecoveryPhase, WindowPersisted
from tests.unit.tools.samples import happened
from tools.chaos.landing import ALL, RECOVERY, Cell, Coverage, Phase, landed, parse_cells
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

    def test_last_phase_of_the_victim_counts_even_if_reported_late(self) -> None:
        events = [*self.EVENTS, phase(2, 'convert', 103.31, 99)]
        assert landed(events, self.FIRST, 103.3, 99) is Phase.CONVERT

    def test_first_fault_lands_in_training(self) -> None:
        assert landed(self.EVENTS[:3], None, 99.0, 10) is Phase.TRAINING
        assert landed([], None, 99.0, 10) is Phase.TRAINING

    def test_first_fault_right_after_a_recovery_lands_in_training(self) -> None:
        events = [phase(0, 'first-iteration', 98.0)]
        assert landed(events, None, 98.1, 10) is Phase.FIRST_ITERATION

    def test_second_fault_after_the_recovery_lands_in_training(self) -> None:
        events = [*self.EVENTS, phase(0, 'over', 105.0)]
        assert landed(events, self.FIRST, 106.0, 10) is Phase.TRAINING


class TestCoverage:
    def test_text_is_parsed_to_cells(self) -> None:
        assert parse_cells('meet,fetch:kill') == [
            Cell(Phase.MEET, Kind.KILL),
            Cell(Phase.FETCH, Kind.KILL),
        ]
        assert len(parse_cells(f'{ALL}:kill,node')) == 2 * len(RECOVERY) == 18

    @pytest.mark.parametrize('text', ['meet', 'training:kill', 'meet:burn', ':'])
    def test_wrong_cells_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match='must be'):
            parse_cells(text)

    def test_empty_cells_are_aimed_at_in_turn_until_they_are_hit(self) -> None:
        cells = parse_cells('meet,fetch:kill,node')
        coverage = Coverage(cells)
        assert coverage.empty() == cells
        assert {coverage.aim([Kind.KILL, Kind.NODE]) for _ in cells} == set(cells)
        coverage.add([cell for cell in cells if cell.kind is Kind.NODE])
        assert {coverage.aim([Kind.KILL, Kind.NODE]) for _ in range(4)} == set(cells[:2])
        assert coverage.aim([Kind.NODE]) in cells[2:]
        assert coverage.aim([Kind.AGENT]) is None
        coverage.add(cells[:2])
        assert coverage.empty() == []
