# SPDX-License-Identifier: Apache-2.0
"""What follows from the paper's inputs and what does not, worked out here by other means."""

import math

import numpy as np
import pytest

from tools.model.layout import PRECISIONS
from tools.simulate.closed_form import Dense, Sparse
from tools.simulate.experts import concentration, lost_by_checkpoint
from tools.simulate.paper import PAPER, ROWS, Verdict, recompute

REPORT = recompute()
OURS = {one.statement: one for one in REPORT.claims}
DEEPSEEK = 'Table 3', 'DeepSeek-MoE'
PARAMETERS = {'MoE-LLaVa': 2.9, 'GPT-MoE': 7.3, 'QWen-MoE': 14.3, 'DeepSeek-MoE': 16.4}
"""Thousand millions."""


def test_cells_of_each_kind_match_a_hand_calculation() -> None:
    found = {
        (cell.system, cell.quantity): cell
        for cell in REPORT.cells
        if (cell.table, cell.setting) == DEEPSEEK and cell.mtbf in ('', '10M')
    }
    ettr = found['MoEvement', 'ettr']
    assert ettr.theirs == 0.951
    assert ettr.ours == pytest.approx(1 / (1 + 0.06 / 2.9) / (1 + 1.5 * 6 * 2.9 / 600))
    assert ettr.exact == Sparse(2.9, 6, 0.06, mtbf_s=600).ettr_exact()
    dense = found['CheckFreq', 'ettr']
    assert dense.ours == pytest.approx(1 / (1 + 0.08 / 2.9) / (1 + 124 * 2.9 / 2 / 600))
    assert dense.exact == Dense(2.9, 124, 0.08, mtbf_s=600).ettr_exact()
    assert dense.verdict == Verdict.DIFFERS
    assert found['CheckFreq', 'recovery_s'].ours == pytest.approx(72 * 124 * 2.9 / 2)
    assert found['MoEvement', 'recovery_s'].ours == pytest.approx(72 * 1.5 * 6 * 2.9)
    assert found['MoC', 'recovery_s'].ours == pytest.approx(72 * 2.9)
    assert found['Gemini', 'interval'].ours == pytest.approx((2 * 0.38 * 31 * 600) ** 0.5 / 2.9)
    assert found['MoC', 'overhead_percent'].verdict == Verdict.INPUT
    assert found['CheckFreq', 'interval'].verdict == Verdict.NO_INPUTS


def test_claims_are_what_the_simulator_says() -> None:
    """Claims of the text are data; most of them once more, from the paper's inputs."""
    rare = {name: ROWS[*DEEPSEEK, name][0]._replace(mtbf_s=900.0).costs.ettr_first_order()
            for name in ('MoEvement', 'Gemini', 'CheckFreq')}  # fmt: skip
    lost = float(lost_by_checkpoint(np.full(64, 1 / 64), 8, 'sequential').mean())
    moc_s = ROWS[*DEEPSEEK, 'MoC'][0].costs.step_s
    assert lost * moc_s / 600 < 0.0375, 'K never doubles'
    windows = {one.name: one.window for one in PAPER.tables[0].settings}
    expected = {
        'slots are smaller than a dense capture by (W = 3)': 1 - (12 + 2 * 2) / 3 / 12,
        'mean over the slots of W = 3': 1 - (12 + 2) / 3 / 12,
        'a window of 6 over a dense capture, in bytes': (12 + 5) / 12,
        'frozen operators save of a conversion, W = 6': 0.33 * 5 / 12,
        'mean minutes between failures': 6 * 60 / 24,
        'goodput of MoEvement over Gemini, MTBF 15 min': rare['MoEvement'] / rare['Gemini'],
        'goodput of MoEvement over CheckFreq, MTBF 15 min': rare['MoEvement'] / rare['CheckFreq'],
        'MoEvement over Gemini, 671B, 10M': 0.86 / 0.55,
        'GPUs of 671B': 64 * 32 * 8,
        'doublings of K in 12 h at 10M, DeepSeek-MoE': 0,
        **{f'alpha for S = {skew}': concentration(float(skew), 64) for skew in ('0.50', '0.99')},
        **{f'bytes of a full capture, C{number}': PRECISIONS[f'c{number}'].full_bytes
           for number in range(1, 6)},
        **{f'GB of host memory, Gemini, {model}': 2 * 12 * size
           for model, size in PARAMETERS.items()},
        **{f'GB of windows, {model}': 2 * (12 + windows[model] - 1) * size
           for model, size in PARAMETERS.items()},
    }  # fmt: skip
    assert {name: OURS[name].ours for name in expected} == pytest.approx(expected)


def test_windows_follow_only_from_whole_model_bytes_over_one_link() -> None:
    """A window of Algorithm 1 implies budgets per parameter, so a bandwidth for the model."""
    rate = (2 + 10 / 6) * 16.4e9 / 2.9  # the least for DeepSeek-MoE's window
    sizes = {'C1': (6, 2), 'C2': (12, 1), 'C3': (10, 1), 'C4': (5, 1), 'C5': (4, 1)}
    met = 0
    for one in (setting for table in PAPER.tables for setting in table.settings):
        full, light = sizes.get(one.name, (12, 2))
        budget = rate * one.iteration_s / (PARAMETERS.get(one.name, 16.4) * 1e9)
        window = max(1, math.ceil((full - light) / (budget - light) - 1e-9))
        assert OURS[f'W of {one.name}'].ours == window
        met += OURS[f'W of {one.name}'].theirs == window
    assert met == 6
