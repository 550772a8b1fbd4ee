# SPDX-License-Identifier: Apache-2.0
"""What follows from the paper's inputs and what does not, as counted by an independent script."""

import pytest

from tools.simulate import paper as claims
from tools.simulate.closed_form import Dense, Sparse
from tools.simulate.paper import Claim, Report, recompute
from tools.simulate.printed import ETTR_TOLERANCE, GEMINI, ROWS, T3, Condition, Verdict, fit


@pytest.fixture(scope='module')
def report() -> Report:
    return recompute()


def claim(report: Report, statement: str) -> Claim:
    (found,) = [one for one in report.claims if one.statement == statement]
    return found


# ---- Tables 3 and 7


def test_cells_of_each_kind_match_a_hand_calculation(report: Report) -> None:
    found = {
        (cell.system, cell.quantity): cell
        for cell in report.cells
        if (cell.table, cell.setting) == ('Table 3', 'DeepSeek-MoE') and cell.mtbf in ('', '10M')
    }
    ettr = found['MoEvement', 'ettr']
    assert ettr.theirs == 0.951
    assert ettr.ours == pytest.approx(1 / (1 + 0.06 / 2.9) / (1 + 1.5 * 6 * 2.9 / 600))
    assert ettr.exact == Sparse(2.9, 6, overhead_s=0.06, mtbf_s=600).ettr_exact()
    dense = found['CheckFreq', 'ettr']
    assert dense.ours == pytest.approx(1 / (1 + 0.08 / 2.9) / (1 + 124 * 2.9 / 2 / 600))
    assert dense.exact == Dense(2.9, 124, 0.08, mtbf_s=600).ettr_exact()
    assert dense.verdict == Verdict.DIFFERS
    assert dense.fitted == pytest.approx(dense.theirs, abs=ETTR_TOLERANCE)
    assert found['CheckFreq', 'recovery_s'].ours == pytest.approx(72 * 124 * 2.9 / 2)
    assert found['MoEvement', 'recovery_s'].ours == pytest.approx(72 * 1.5 * 6 * 2.9)
    assert found['MoC', 'recovery_s'].ours == pytest.approx(72 * 2.9)
    assert found['Gemini', 'interval'].ours == pytest.approx((2 * 0.38 * 31 * 600) ** 0.5 / 2.9)
    assert found['MoC', 'overhead_percent'].verdict == Verdict.INPUT
    assert found['CheckFreq', 'interval'].verdict == Verdict.NO_INPUTS


def test_fit_finds_constants_that_made_the_numbers() -> None:
    def made(one: Condition) -> float:
        overhead_s = one.overhead_s + 0.1
        return Dense(2.9, int(one.interval), overhead_s, 60, one.mtbf_s).ettr_first_order()

    row = T3, 'DeepSeek-MoE', GEMINI
    found = fit(row, [one._replace(ettr=made(one)) for one in ROWS[row]])
    assert (found.extra_s, found.restart_s, found.within) == (0.1, 60, 5)


# ---- sizes and windows


def test_windows_follow_only_from_whole_model_bytes_over_one_link(report: Report) -> None:
    ranges = claims.implied_bandwidths()
    rate, met = claims.best_bandwidth(ranges)
    assert met == 6
    assert rate == pytest.approx(20.7e9, rel=0.01)
    for one in ranges:
        for bandwidth in (one.least, one.below * 0.9999):
            assert claims.window_as_printed(one.setting, bandwidth) == one.setting.window
        assert claims.window_as_printed(one.setting, one.below) == one.setting.window - 1
    assert claims.window_as_printed(ranges[0].setting, 1e9) is None
    share = claim(report, 'largest share of an iteration that W = 1 needs').ours
    assert share is not None and share < 0.05


# ---- figures and text


@pytest.mark.parametrize(
    ('statement', 'ours', 'verdict'),
    [
        ('slots are smaller than a dense capture by (W = 3)', 0.556, Verdict.FOLLOWS),
        ('mean over the slots of W = 3', 0.611, Verdict.FINDING),
        ('frozen operators save of a conversion, W = 6', 0.1375, Verdict.DIFFERS),
        ('mean minutes between failures', 15, Verdict.DIFFERS),
        ('bytes of a full capture, C1', 8, Verdict.DIFFERS),
        ('bytes of a capture of compute weights, C1', 2, Verdict.FOLLOWS),
        ('bytes of a full capture, C2', 13, Verdict.DIFFERS),
        ('bytes of a full capture, C5', 5, Verdict.DIFFERS),
        ('bytes of a capture of compute weights, C5', 1, Verdict.FOLLOWS),
        ('doublings of K in 12 h at 10M, DeepSeek-MoE', 0, Verdict.DIFFERS),
        ('alpha for S = 0.50', 1 / 64, Verdict.FOLLOWS),
        ('GPUs of 671B', 16384, Verdict.FOLLOWS),
        ('MoEvement over Gemini, 671B, 10M', 1.564, Verdict.FOLLOWS),
        ('survival of 4 failures with maximum rank overlap', 129 / 210, Verdict.DIFFERS),
        ('goodput of MoEvement over Gemini, MTBF 15 min', 1.120, Verdict.FOLLOWS),
    ],
)
def test_claims_have_these_verdicts(
    report: Report, statement: str, ours: float, verdict: Verdict
) -> None:
    found = claim(report, statement)
    assert found.ours == pytest.approx(ours, abs=0.001)
    assert found.verdict == verdict
