# SPDX-License-Identifier: Apache-2.0
"""The tool prints ours beside theirs, and the counts; disagreement is no error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.simulate.paper.__main__ import main

ROOT = Path(__file__).resolve().parents[4]


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


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['--json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {'iteration_s', 'cells', 'constants', 'claims', 'counts', 'notes'}
    assert len(found['cells']) == 504
    cell = next(one for one in found['cells'] if one['quantity'] == 'ettr')
    assert {'theirs', 'ours', 'exact', 'fitted', 'tolerance', 'verdict'} <= cell.keys()
    assert found['notes'] and found['claims'] and len(found['constants']) == 18


@pytest.mark.parametrize(
    'command', [['-m', 'tools.simulate', 'paper'], ['-m', 'tools.simulate.paper']]
)
def test_runs_as_part_of_the_simulator_and_by_itself(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *command, '--json'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)['counts']
