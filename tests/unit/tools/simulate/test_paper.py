# SPDX-License-Identifier: Apache-2.0
"""What follows from the paper's inputs and what does not, as counted by an independent script."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.simulate.closed_form import Dense, Sparse
from tools.simulate.paper import claims
from tools.simulate.paper.__main__ import Report, main, recompute
from tools.simulate.paper.cells import Verdict, all_cells, fit, judge, slot_bytes
from tools.simulate.paper.claims import Claim, best_constant_ettr, lost_token_share
from tools.simulate.paper.printed import DENSE, GEMINI, MOC, PAPER, ROWS, T3, Condition

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope='module')
def report() -> Report:
    return recompute()


def claim(report: Report, statement: str) -> Claim:
    (found,) = [one for one in report.claims if one.statement == statement]
    return found


# ---- Tables 3 and 7


@pytest.mark.parametrize(
    ('system', 'follow', 'readable'),
    [('CheckFreq', 1, 33), ('Gemini', 5, 35), ('MoC', 4, 6), ('MoEvement', 30, 35)],
)
def test_closed_forms_give_these_ettrs_without_a_fitted_constant(
    report: Report, system: str, follow: int, readable: int
) -> None:
    count = report.count(system, 'ettr')
    assert (count.follow, count.cells) == (follow, readable)


def test_two_constants_per_row_meet_most_dense_cells(report: Report) -> None:
    assert sum(one.within for one in report.constants) == 61
    assert sum(one.cells for one in report.constants) == 68
    assert len(report.constants) == 9 * 2
    fitted = [report.count(system, 'ettr').fitted_follow for system in DENSE]
    assert sum(one for one in fitted if one is not None) == 61


def test_one_number_matches_as_many_cells_as_the_formula_for_moevement() -> None:
    constant, met, readable = best_constant_ettr()
    assert constant == pytest.approx(0.966)
    assert (met, readable) == (32, 35)


def test_every_readable_cell_is_there_once(report: Report) -> None:
    readable = Counter({
        (*row, quantity): sum(one is not None for one in values)
        for row, conditions in ROWS.items()
        for quantity, values in conditions[0].setting.systems[row[2]].items()
    })  # fmt: skip
    found = Counter(
        (cell.table, cell.setting, cell.system, cell.quantity)
        for cell in report.cells
        if cell.table != 'Table 6'
    )
    assert found == +readable
    assert found.total() == 484


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
    assert dense.exact == Dense(2.9, 124, overhead_s=0.08, mtbf_s=600).ettr_exact()
    assert dense.verdict == Verdict.DIFFERS and dense.fitted_verdict == Verdict.FOLLOWS
    assert found['CheckFreq', 'recovery_s'].ours == pytest.approx(72 * 124 * 2.9 / 2)
    assert found['MoEvement', 'recovery_s'].ours == pytest.approx(72 * 1.5 * 6 * 2.9)
    assert found['MoC', 'recovery_s'].ours == pytest.approx(72 * 2.9)
    assert found['Gemini', 'interval'].ours == pytest.approx((2 * 0.38 * 31 * 600) ** 0.5 / 2.9)
    assert found['MoC', 'overhead_percent'].verdict == Verdict.INPUT
    assert found['CheckFreq', 'interval'].verdict == Verdict.NO_INPUTS


def test_fit_finds_constants_that_made_the_numbers() -> None:
    def made(one: Condition) -> float:
        overhead_s = one.overhead_s + 0.1
        return Dense(2.9, int(one.interval), overhead_s, 0.0, 60, one.mtbf_s).ettr_first_order()

    row = T3, 'DeepSeek-MoE', GEMINI
    found = fit(row, [one._replace(ettr=made(one)) for one in ROWS[row]])
    assert (found.extra_s, found.restart_s, found.within) == (0.1, 60, 5)


def test_recovery_columns_contradict_the_formulas(report: Report) -> None:
    assert report.count('MoEvement', 'recovery_s').follow == 0
    least = claim(report, 'reported recovery of MoEvement over 3/2 W T, least').ours
    greatest = claim(report, 'reported recovery of MoEvement over 3/2 W T, greatest').ours
    assert (least, greatest) == (pytest.approx(0.13, abs=0.005), pytest.approx(0.34, abs=0.005))
    needed = claim(report, 'recovery its ETTR needs over the reported one, 10M, least').ours
    assert needed is not None and needed > 5


# ---- sizes and windows


def test_slots_and_windows_match_a_hand_calculation() -> None:
    assert slot_bytes(3) == pytest.approx([16 / 3, 14 / 3, 12 / 3])
    for window, ratio in ((3, 1.17), (5, 1.33), (6, 1.42)):
        assert slot_bytes(window).sum() / 12 == pytest.approx(ratio, abs=0.005)


def test_table_6_follows_in_part(report: Report) -> None:
    gemini = report.count('Gemini', 'host_gb')
    assert (gemini.follow, gemini.fitted_follow, gemini.cells) == (0, 4, 4)
    follows = [
        cell.setting
        for cell in report.cells
        if cell.quantity == 'windows_gb' and cell.verdict == Verdict.FOLLOWS
    ]
    assert follows == ['MoE-LLaVa', 'GPT-MoE']
    assert report.count('MoEvement', 'total_gb').follow == 4
    assert report.count('MoEvement', 'more_percent').follow == 4


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


def test_k_doubles_only_where_failures_are_more_frequent_than_in_the_tables() -> None:
    rule, condition = PAPER.text['moc'], ROWS[T3, 'DeepSeek-MoE', MOC][0]
    assert lost_token_share(condition, rule, 600) < rule['lost_token_limit']
    assert lost_token_share(condition, rule, 280) > rule['lost_token_limit']


def test_fitted_constants_are_not_per_cell(report: Report) -> None:
    fits = {(one.table, one.setting, one.system): one for one in report.constants}
    assert [cell for cell in all_cells(fits) if cell.fitted is not None]
    assert not any(cell.fitted for cell in all_cells({}))
    ours = [cell.ours for cell in all_cells({})]
    assert ours == [cell.ours for cell in report.cells if cell.table != 'Table 6']


@pytest.mark.parametrize(
    ('ours', 'verdict'),
    [(1.0, Verdict.FOLLOWS), (1.015, Verdict.FOLLOWS), (0.984, Verdict.DIFFERS)],
)
def test_judge_takes_both_sides(ours: float, verdict: Verdict) -> None:
    assert judge(ours, 1.0, 0.015) == verdict


# ---- the command


def test_text_has_every_kind_of_table_and_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    for title in (
        'Table 3: ETTR',
        'Table 7: seconds of recovery in a run',
        'Table 6: host memory of windows, GB',
        'Figures and text',
        'Fitted to the ETTRs',
        'Cells that could not be read',
    ):
        assert title in text
    row = next(line for line in text.splitlines() if line.split()[:3] == ['C1', 'Gemini', '10M'])
    assert row.split()[3:] == ['0.795', '0.854', '+0.059', '0.846', '0.795', 'no']
    summary = ' '.join(text.split())
    assert 'CheckFreq 1 of 33, Gemini 5 of 35, MoC 4 of 6, MoEvement 30 of 35' in summary
    assert 'dense systems 61 of 68' in summary


@pytest.mark.parametrize('tool', [['tools.simulate', 'paper'], ['tools.simulate.paper']])
def test_json_has_everything_as_part_of_the_simulator_and_alone(tool: list[str]) -> None:
    command = [sys.executable, '-m', *tool, '--json']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found.keys() == {'iteration_s', 'cells', 'constants', 'claims', 'counts', 'notes'}
    assert len(found['cells']) == 504 and len(found['constants']) == 18
