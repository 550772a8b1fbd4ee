# SPDX-License-Identifier: Apache-2.0
"""Few ranks meet, as many do; all processes are real."""

import pytest

from moevement_ext.store import branches
from tools.bench import meeting
from tools.bench.meeting import Bench, measure


@pytest.mark.parametrize('nodes_of_a_branch', [1, 3])
def test_ranks_meet_with_and_without_branches(
    nodes_of_a_branch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, 'NODES_OF_A_BRANCH', nodes_of_a_branch)
    size = measure(Bench([24], 2, 1, True), 24)
    assert size.branches == (3 if nodes_of_a_branch == 1 else 0)
    assert (size.branch_s > 0) == (size.branches > 0)
    assert min(size.store_s, size.pack_s, size.read_s, size.packed_kib) > 0
    assert size.at_least_s <= size.at_most_s < size.at_least_s + size.store_s + size.branch_s


@pytest.mark.parametrize('flags', [['--ranks', '8'], ['--ranks', '256', '64'], ['--failures', '0']])
def test_refused_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        meeting.parse_arguments(flags)
    assert flags[0] in capsys.readouterr().err
