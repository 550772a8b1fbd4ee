# SPDX-License-Identifier: Apache-2.0
"""What a drill runs, when it is passed, and what it leaves in host memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moevement_ext.config_file import last_value
from moevement_ext.events import Event, NextTier, Recovered
from tools import drill
from tools.drill import drill_flags
from tools.lab.evidence import problems
from tools.lab.programs import LabError, program


def recovered(rank: int, **changes: Any) -> Recovered:
    usual: dict[str, Any] = {'replayed': 3, 'verified': 4, 'verified_at': 9, 'differing': [],
                             'seconds': {'meet': 1.0}, 'iterations': 1}  # fmt: skip
    return Recovered(rank=rank, **{**usual, **changes})


GOOD = [recovered(rank) for _ in range(2) for rank in range(2)]


@pytest.mark.parametrize(
    ('events', 'kinds', 'expected'),
    [
        (GOOD, [], []),
        (GOOD, ['exp_avg', 'rng'],
         ['the final state differs from the undisturbed one: exp_avg rng']),
        (GOOD[:2], [], ['2 failures were staged; recoveries by rank: [1, 1]']),
        (GOOD[:3], [], ['2 failures were staged; recoveries by rank: [2, 1]']),
        ([*GOOD[:3], recovered(1, differing=['layers.1.expert.0'])], [],
         ['1 recovered operators differ, such as rank 1: layers.1.expert.0']),
        ([*GOOD, NextTier(reason='no log', tier='the whole job')], [],
         ['it went on from the whole job: no log']),
    ],
)  # fmt: skip
def test_only_complete_recoveries_pass_the_drill(
    events: list[Event], kinds: list[str], expected: list[str]
) -> None:
    assert problems(events, 2, 2, kinds) == expected


def test_the_job_runs_in_the_image_of_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('SLURM_JOB_NODELIST', 'n[1-3]')
    monkeypatch.setenv('SLURM_JOB_NUM_NODES', '3')
    monkeypatch.setenv('STEP_FLAGS', '--container-image=IMAGE --exact')
    monkeypatch.setenv('AGENT_PYTHON', '')
    command = drill._launcher(program('drill', None).parse_args([]))[0]
    assert '--step-flags=--container-image=IMAGE --exact' in command
    assert not any(flag.startswith('--agent-python') for flag in command)
    monkeypatch.setenv('AGENT_PYTHON', 'apptainer exec IMAGE.sif python')
    command = drill._launcher(program('drill', None).parse_args([]))[0]
    assert '--agent-python=apptainer exec IMAGE.sif python' in command


# ---- flags of its jobs

OWN = [
    '--lr-decay-iters', '5000', '--train-iters', '60', '--log-interval', '1', '--sparse-ckpt',
    '--sparse-ckpt-run-id', 'drill-1', '--sparse-ckpt-events', '/e/events',
    '--sparse-ckpt-digest', '/e/digest.json',
]  # fmt: skip


def made(given: str) -> list[str]:
    return drill_flags(given.split(), 60, 'drill-1', Path('/e'))


def test_nothing_of_the_real_run_is_touched() -> None:
    """Neither its checkpoints, nor its windows, nor its logs."""
    own = '--bf16 --data-path 0.3 a 0.7 b --seed=7 --lr -1e-3 '
    own += '--save /ckpt --load=/ckpt --save-interval 5 --sparse-ckpt --sparse-ckpt-run-id real'
    own += ' --sparse-ckpt-events /real --tensorboard-dir /tb --exit-interval 7 --async-save'
    own += ' --train-iters 5000 --log-interval 10'
    kept = '--bf16 --data-path 0.3 a 0.7 b --seed 7 --lr -1e-3'.split()
    assert made(own) == [*kept, *OWN]


def test_the_schedule_is_that_of_the_whole_run() -> None:
    """Else a warm-up longer than the drill would be refused."""
    assert made('--train-iters 9 --lr-decay-iters 7')[:2] == ['--lr-decay-iters', '7']
    assert '--lr-decay-iters' not in made('--bf16')


# ---- host memory


def left_by(run_id: str, root: Path) -> Path:
    window = root / f'{run_id}.0a1b2c3d' / 'node0' / '0' / '0' / 'window-4-plan.window'
    window.parent.mkdir(parents=True)
    window.touch()
    return window


@pytest.mark.parametrize('in_slurm', [False, True])
def test_windows_of_one_run_are_deleted_on_all_nodes(
    in_slurm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / 'host memory'
    left_by('drill-12-disturbed', root)
    other = left_by('run-7', root)
    if in_slurm:  # it runs the command of a step here
        srun = tmp_path / 'srun'
        srun.write_text('#!/bin/sh\nwhile [ "$1" != "${1#--}" ]; do shift; done\nexec "$@"\n')
        srun.chmod(0o755)
        monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
        monkeypatch.setenv('SLURM_JOB_NODELIST', 'n[1-2]')
    drill.remove_memory([str(root)], 'drill-12-disturbed')
    assert [path.name for path in root.iterdir()] == ['run-7.0a1b2c3d']
    assert other.exists()


def test_a_job_that_failed_leaves_no_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its run id is drawn: no later launch would use or delete them."""
    left: list[Path] = []

    def fails(command: Sequence[str]) -> int:
        left.append(left_by(last_value(command, '--sparse-ckpt-run-id') or '', tmp_path / 'memory'))
        return 1

    monkeypatch.setattr(drill, '_run', fails)
    own = ['--output', str(tmp_path / 'drill'), '--', '--sparse-ckpt-dir', str(tmp_path / 'memory')]
    assert drill.main(own) == 2
    assert 'the undisturbed job ended with status 1' in capsys.readouterr().err
    assert left and not left[0].exists()


def test_nodes_that_cannot_be_reached_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.setenv('SLURM_JOB_NODELIST', 'n[1-2]')
    with pytest.raises(
        LabError, match="delete them: srun .*--ntasks-per-node=1 .* 'rm -rf /dev/shm/m/drill-12"
    ):
        drill.remove_memory(['/dev/shm/m'], 'drill-12-disturbed')
