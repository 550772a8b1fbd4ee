# SPDX-License-Identifier: Apache-2.0
"""What is said of the flags of a job before it starts, besides `test_recorded_answers.py`.

That a start says the same: `tests/distributed/test_refusals.py`.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.unit.tools.test_recorded_answers import JOB
from tools import prepare_data
from tools.check import main


def test_a_part_of_the_data_without_documents_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, prefix = tmp_path / 'text.txt', tmp_path / 'text'
    text.write_text('a document')
    assert prepare_data.main(['--input', str(text), '--output-prefix', str(prefix)]) == 0
    capsys.readouterr()
    flags = ['--', *JOB.split(), '--data-path', str(prefix), '--split']
    assert main([*flags, '9,1,0']) == 2
    said = f'refused: --split 9,1,0: a part of it gets none of the 1 sequences of {prefix}; give'
    assert capsys.readouterr().out.startswith(said)
    assert main([*flags, '1,0,0']) == 0


@pytest.mark.parametrize(('own', 'ranks'), [([], 8), (['--nproc', '16'], 16)])
def test_ranks_are_as_given_or_those_of_the_environment(
    own: list[str],
    ranks: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv('WORLD_SIZE', '8')
    before, environment = sys.argv, dict(os.environ)
    assert main([*own, '--', *JOB.split()]) == 0
    assert capsys.readouterr().out.endswith(f'; world size {ranks}\n')
    assert (sys.argv, dict(os.environ)) == (before, environment)
    assert main([*own, '--json', '--', *JOB.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found['protected'], found['ranks'], found['refused']) == (True, ranks, [])


def test_nothing_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = f'--tensorboard-dir {tmp_path}/board --save {tmp_path}/dense --save-interval 5'
    flags += f' --sparse-ckpt-dir {tmp_path}/memory --sparse-ckpt-events {tmp_path}/events'
    flags += f' --sparse-ckpt-digest {tmp_path}/runs/digest.json'
    assert main(['--', *JOB.split(), *flags.split()]) == 0
    assert not list(tmp_path.iterdir())
