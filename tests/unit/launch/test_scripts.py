# SPDX-License-Identifier: Apache-2.0
"""The batch scripts, from any folder and in a container image, down to the arguments of `srun`."""

import os
import subprocess
from pathlib import Path

import pytest

from moevement_ext.launch.link import Address
from moevement_ext.launch.node import slurm_step
from moevement_ext.launch.slurm import parse

pytestmark = pytest.mark.timed

ROOT = Path(__file__).resolve().parents[3]
PRINTS = "#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n"
NOTES = '#!/usr/bin/env bash\nprintf \'%s\\n\' "$@" >"$0.asked"\n'
TRAINING = ['slurm_pretrain.sbatch', 'slurm_requeue.sbatch']
PYXIS = '--container-image=nvcr.io#a/b:1 --container-mounts=/work:/work'
APPTAINER = 'apptainer exec --nv "my image.sif" python'


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder outside the checkout, with fake Slurm commands and a Python that only prints."""
    bin_ = tmp_path / 'bin'
    bin_.mkdir()
    for name, text in (('printer', PRINTS), ('srun', NOTES), ('scontrol', PRINTS)):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    folder = tmp_path / 'my project'
    folder.mkdir()
    return folder


def submit(script: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        'PATH': f'{folder.parent / "bin"}:/usr/bin:/bin',
        'SLURM_SUBMIT_DIR': str(folder),
        'SLURM_JOB_NAME': 'moevement',
        'SLURM_JOB_ID': '42',
        'SLURM_GPUS_ON_NODE': '2',
        'PYTHON': str(folder.parent / 'bin' / 'printer'),
        **variables,
    }
    return subprocess.run(
        ['bash', str(ROOT / 'scripts' / script), '--bf16'], env=environment, cwd='/',
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize('script', [*TRAINING, 'slurm_drill.sbatch'])
def test_submission_outside_a_checkout_is_refused(script: str, elsewhere: Path) -> None:
    result = submit(script, elsewhere)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        f'{elsewhere} is no checkout: submit from there, or set MOEVEMENT_HOME to it'
    )


@pytest.mark.parametrize('script', TRAINING)
def test_job_runs_the_program_of_moevement_home(script: str, elsewhere: Path) -> None:
    result = submit(script, elsewhere, MOEVEMENT_HOME=str(ROOT))
    assert result.returncode == 0, result.stderr
    command = result.stdout.splitlines()
    assert command[:2] == ['-m', 'moevement_ext.launch.slurm']
    assert command[-2:] == [str(ROOT / 'pretrain_gpt.py'), '--bf16']
    assert '--grace' not in command
    command = submit(script, elsewhere, MOEVEMENT_HOME=str(ROOT), GRACE='500').stdout.splitlines()
    assert command[command.index('--grace') + 1] == '500'


@pytest.mark.parametrize(
    ('variables', 'flags', 'python'),
    [
        (
            {'STEP_FLAGS': PYXIS, 'AGENT_PYTHON': 'python'},
            ['--container-image=nvcr.io#a/b:1', '--container-mounts=/work:/work'],
            ['python'],
        ),
        (
            {'AGENT_PYTHON': APPTAINER},
            [],
            ['apptainer', 'exec', '--nv', 'my image.sif', 'python'],
        ),
    ],
    ids=['pyxis', 'apptainer'],
)
def test_agents_run_in_a_container_image(
    variables: dict[str, str],
    flags: list[str],
    python: list[str],
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = submit('slurm_pretrain.sbatch', elsewhere, MOEVEMENT_HOME=str(ROOT), **variables)
    monkeypatch.setenv('PATH', f'{elsewhere.parent / "bin"}:{os.environ["PATH"]}')
    scontrol = elsewhere.parent / 'bin' / 'scontrol'
    scontrol.write_text('#!/usr/bin/env bash\nprintf "n1\\nn2\\n"\n')
    monkeypatch.setenv('SLURM_JOB_NODELIST', 'n[1-2]')
    job = parse(result.stdout.splitlines()[2:])
    step = slurm_step('n1', Address('here', 1, b''), job.step_flags, job.agent_python)
    step.close(60.0)
    asked = (elsewhere.parent / 'bin' / 'srun.asked').read_text().splitlines()
    assert asked[-len(python) - 2 :] == [*python, '-m', 'moevement_ext.launch.agent']
    assert '--nodelist=n1' in asked and [flag for flag in asked if 'container' in flag] == flags


def test_words_in_quotes_stay_together(elsewhere: Path) -> None:
    """The launcher splits these variables in the same way."""
    home = str(ROOT)
    given = {'AGENT_PYTHON': APPTAINER, 'DRILL': '--text "two words"'}
    drill = submit('slurm_drill.sbatch', elsewhere, MOEVEMENT_HOME=home, **given)
    words = drill.stdout.splitlines()
    assert words[words.index('--text') + 1 :][:2] == ['two words', '--'], drill.stderr


SRUN = """\
#!/usr/bin/env bash
echo "$@ $(env | grep ^SLURM_ | sort | xargs)" >"$0.asked"
"""
ASKED = {
    'one number a node': ('SLURM_GPUS_PER_NODE=8', '', 'SLURM_GPUS_PER_NODE=8'),
    'one a task': ('SLURM_GPUS_PER_TASK=1', '--gpus-per-node=8', ''),
    'one a task, Slurm 24': ('SLURM_TRES_PER_TASK=gres/gpu:1', '--gpus-per-node=8', ''),
    'a number in all': ('SLURM_GPUS=16', '--gpus-per-node=8', ''),
    'one a task, by its binding': ('SLURM_GPU_BIND=single:1', '--gpus-per-node=8', ''),
    'the same, by another name': ('SLURM_TRES_BIND=gres/gpu:single:1', '--gpus-per-node=8', ''),
    'a task each': ('SLURM_NTASKS_PER_GPU=1', '--gpus-per-node=8', ''),
}


def asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    srun = folder / 'srun'
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv('PATH', f'{folder}:/usr/bin:/bin')
    slurm_step('n1', Address('here', 1, b'')).close(60.0)
    return (folder / 'srun.asked').read_text().split()


@pytest.mark.parametrize(('variable', 'flag', 'left'), ASKED.values(), ids=ASKED.keys())
def test_agent_gets_all_gpus_of_its_node(
    variable: str, flag: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one task would get one GPU, or request those of all nodes on one node."""
    monkeypatch.setenv(*variable.split('='))
    monkeypatch.setenv('SLURM_GPUS_ON_NODE', '8')
    asked = asked_for(tmp_path, monkeypatch)
    assert [word for word in asked if word.startswith('--gpus')] == flag.split()
    assert [word for word in asked if word.startswith('SLURM_')] == [
        'SLURM_GPUS_ON_NODE=8',
        *left.split(),
    ]


@pytest.mark.parametrize(
    ('tasks', 'cpus'), [(None, 12), ('1(x5)', 12), ('8(x5)', 96), ('8(x3),4', 48)]
)
def test_agent_gets_the_cpus_of_all_tasks_of_its_node(
    tasks: str | None, cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('SLURM_CPUS_PER_TASK', '12')
    if tasks is not None:
        monkeypatch.setenv('SLURM_TASKS_PER_NODE', tasks)
    asked = asked_for(tmp_path, monkeypatch)
    assert [word for word in asked if word.startswith('--cpus')] == [f'--cpus-per-task={cpus}']
