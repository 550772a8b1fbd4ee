# SPDX-License-Identifier: Apache-2.0
"""When a drill is passed; a function of events."""

import re
from typing import Any

import pytest
from rich.console import Console

from moevement_ext.events import DeviceProblem, Event, NextTier, Recovered
from tools import drill
from tools.chaos.verdict import devices, problems, recoveries, replaced, table
from tools.drill import main


def recovered(rank: int, **changes: Any) -> Recovered:
    usual: dict[str, Any] = {
        'scope': 'localized', 'target': 9, 'stages': [rank], 'replacements': [1], 'copied': [],
        'replayed': 3, 'verified': 4, 'verified_at': 9, 'differing': [],
        'seconds': {'meet': 1.0, 'replay': 0.5},
    }  # fmt: skip
    return Recovered(rank=rank, **{**usual, **changes})


GOOD = [recovered(rank) for _ in range(2) for rank in range(2)]


def test_complete_recovery_passes_the_drill() -> None:
    assert problems(GOOD, 2, 2, []) == []
    first, second = recoveries(GOOD, 2)
    for one in (first, second):
        assert (one.scope, one.stages, replaced(one)) == ('localized', [0, 1], [1])
        assert (one.replayed, one.verified, one.differing) == (3, 8, [])
    with (console := Console(width=120)).capture() as shown:
        console.print(table([first]))
    assert re.search(r'localized .* 0 1 .* 3 .* 1\.5 .* 8 ', shown.get())


@pytest.mark.parametrize(
    ('events', 'kinds', 'expected'),
    [
        (GOOD, ['exp_avg', 'rng'],
         ['the final state differs from the undisturbed one: exp_avg rng']),
        (GOOD[:2], [], ['2 failures were staged; recoveries by rank: [1, 1]']),
        (GOOD[:3], [], ['2 failures were staged; recoveries by rank: [2, 1]']),
        ([], [], ['2 failures were staged; recoveries by rank: [0, 0]']),
        (
            [*GOOD[:3], recovered(1, differing=['layers.1.expert.0'])],
            [],
            ['recovery 2: 1 operators differ, such as rank 1: layers.1.expert.0'],
        ),
        (
            [*GOOD, NextTier(reason='no log', tier='the whole job')],
            [],
            ['it went on from the whole job: no log'],
        ),
    ],
)  # fmt: skip
def test_incomplete_recovery_fails_the_drill(
    events: list[Event], kinds: list[str], expected: list[str]
) -> None:
    assert problems(events, 2, 2, kinds) == expected


def test_gpu_problem_is_reported_once_and_does_not_fail_the_drill() -> None:
    worn = DeviceProblem(rank=1, device='GPU-7', harm='worn', what='an NVLink was trained again')
    events = [*GOOD, worn, worn]
    assert devices(events) == ['rank 1: GPU GPU-7: an NVLink was trained again (worn)']
    assert problems(events, 2, 2, []) == []


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        ([], 'no flags of pretrain_gpt.py: put -- and them'),
        (['--first', '5', '--second', '5', '--', '--bf16'], 'each must be above the one before'),
        (['--output', '/', '--', '--bf16'], '--output / is there already'),
        (['--nodes', '0', '--', '--bf16'], 'give numbers of 1 or more'),
    ],
)
def test_mistakes_of_the_user_are_named(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().out


def test_the_job_runs_in_the_image_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('SLURM_JOB_NODELIST', 'n[1-3]')
    monkeypatch.setenv('SLURM_JOB_NUM_NODES', '3')
    monkeypatch.setenv('STEP_FLAGS', '--container-image=IMAGE --exact')
    monkeypatch.setenv('AGENT_PYTHON', '')
    command = drill._job(drill._parser().parse_args([])).command
    assert '--step-flags=--container-image=IMAGE --exact' in command
    assert not any(flag.startswith('--agent-python') for flag in command)
    monkeypatch.setenv('AGENT_PYTHON', 'apptainer exec IMAGE.sif python')
    command = drill._job(drill._parser().parse_args([])).command
    assert '--agent-python=apptainer exec IMAGE.sif python' in command


def test_a_wrong_flag_of_the_job_is_found_before_anything_is_launched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched: list[object] = []
    monkeypatch.setattr(drill, '_run', launched.append)
    with pytest.raises(SystemExit) as ended:
        main(['--', '--sparse-ckpt-windw', '3'])
    assert ended.value.code == 2 and not launched
    assert 'did you mean --sparse-ckpt-window?' in capsys.readouterr().err
