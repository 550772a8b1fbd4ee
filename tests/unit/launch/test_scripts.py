# SPDX-License-Identifier: Apache-2.0
"""The batch scripts, from any folder and in a container image, down to the arguments of `srun`."""

import argparse
import os
import subprocess
from pathlib import Path

import pytest

from megatron.moevement.seams import cpu_device
from moevement_ext.launch.link import Address
from moevement_ext.launch.node import slurm_step
from moevement_ext.launch.slurm import parse

cpu_device.install()

from megatron.training.arguments import add_megatron_arguments  # noqa: E402

from tools.lab.programs import program  # noqa: E402

pytestmark = pytest.mark.timed

ROOT = Path(__file__).resolve().parents[3]
PRINTS = "#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n"
NOTES = '#!/usr/bin/env bash\nprintf \'%s\\n\' "$@" >"$0.asked"\n'
NODES = "#!/usr/bin/env bash\nprintf '%s\\n' node-{a,b,c,d,e}\n"
TRAINING = ['slurm_pretrain.sbatch', 'slurm_requeue.sbatch']
PYXIS = '--container-image=nvcr.io#a/b:1 --container-mounts=/work:/work'
APPTAINER = 'apptainer exec --nv "my image.sif" python'


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the checkout, with fake Slurm commands and a Python that only prints."""
    bin_ = tmp_path / 'bin'
    bin_.mkdir()
    for name, text in (
        ('printer', PRINTS),
        ('srun', NOTES),
        ('salloc', PRINTS),
        ('scontrol', NODES),
    ):
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    folder = tmp_path / 'my project'
    folder.mkdir()
    monkeypatch.setenv('PATH', f'{bin_}:{os.environ["PATH"]}')
    monkeypatch.setenv('SLURM_JOB_NODELIST', 'node-[a-e]')
    monkeypatch.chdir(ROOT)
    return folder


def submit(
    script: str, folder: Path, *flags: str, **variables: str
) -> subprocess.CompletedProcess[str]:
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
        ['bash', str(ROOT / 'scripts' / script), *flags], env=environment, cwd='/',
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def command_of(script: str, folder: Path, *flags: str, **variables: str) -> list[str]:
    """What a script of this checkout starts."""
    result = submit(script, folder, *flags, MOEVEMENT_HOME=str(ROOT), **variables)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize('script', [*TRAINING, 'slurm_drill.sbatch'])
def test_submission_outside_a_checkout_is_refused(script: str, elsewhere: Path) -> None:
    result = submit(script, elsewhere)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        f'{elsewhere} is no checkout: submit from there, or set MOEVEMENT_HOME to it'
    )


@pytest.mark.parametrize(('script', 'spare'), [(TRAINING[0], 1), (TRAINING[1], 0)])
def test_flags_of_a_batch_script_exist(script: str, spare: int, elsewhere: Path) -> None:
    command = command_of(script, elsewhere)
    assert command[:3] == ['-m', 'moevement_ext.command', 'slurm'] and '--grace' not in command
    job = parse(command[3:])
    assert (job.launch.nodes, job.launch.workers_per_node) == (5 - spare, 2)
    assert job.requeue is (spare == 0) and job.before_end_s is None
    assert job.launch.program == 'pretrain_gpt.py'
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args, unknown = parser.parse_known_args(job.launch.flags)
    ours = ['--sparse-ckpt', '--sparse-ckpt-run-id', Path(args.save).name]
    assert unknown == ours  # all else is Megatron's
    assert args.exit_signal_handler and args.save == args.load
    assert '\n#SBATCH --signal=B:TERM@' in (ROOT / 'scripts' / script).read_text('utf-8')
    assert args.num_layers % args.pipeline_model_parallel_size == 0
    assert args.num_experts % args.expert_model_parallel_size == 0
    own = command_of(script, elsewhere, '--bf16', GRACE='500')
    assert own[-2:] == ['pretrain_gpt.py', '--bf16']
    assert own[own.index('--grace') + 1] == '500'


@pytest.mark.parametrize('flags', [(), ('--bf16', '--num-layers', '4')])
def test_flags_of_the_drill_exist(flags: tuple[str, ...], elsewhere: Path) -> None:
    command = command_of('slurm_drill.sbatch', elsewhere, *flags)
    assert command[:3] == ['-m', 'moevement_ext.command', 'drill']
    end = command.index('--')
    args = program('drill', None).parse_args(command[3:end])
    assert (args.spare_nodes, args.workers_per_node) == (1, 2)
    assert '--num-layers' in command[end:]
    assert not flags or command[end + 1 :] == list(flags)


def test_training_from_here_asks_for_an_allocation(elsewhere: Path) -> None:
    """Its launcher looks for the end: Slurm signals a batch script, but not what salloc runs."""
    script, salloc = 'slurm_from_here.sh', elsewhere.parent / 'bin' / 'salloc'
    asked = command_of(script, elsewhere, '--nodes=9', '--', '--num-layers', '4')
    program = asked.index('bash')
    batch = str(ROOT / 'scripts' / 'slurm_pretrain.sbatch')
    assert asked[program:] == ['bash', batch, '--num-layers', '4']
    assert '--no-kill' in asked[:program]
    assert [flag for flag in asked if flag.startswith('--nodes=')][-1] == '--nodes=9'
    salloc.write_text('#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done; exec "$@"\n')
    command = command_of(script, elsewhere, '--nodes=5')
    assert command[:3] == ['-m', 'moevement_ext.command', 'slurm']
    assert parse(command[3:]).before_end_s == 120.0


@pytest.mark.parametrize(
    ('variables', 'workers'),
    [
        ({}, '1'),
        ({'SLURM_GPUS_PER_NODE': '4'}, '4'),
        ({'SLURM_GPUS_PER_NODE': 'h100:8'}, '8'),
        ({'SLURM_GPUS_PER_NODE': '4', 'SLURM_GPUS_ON_NODE': '2'}, '2'),
    ],
)
def test_workers_of_a_node_equal_its_requested_gpus(
    variables: dict[str, str], workers: str
) -> None:
    command = ['bash', '-c', f'source {ROOT / "scripts" / "slurm_job.sh"}; gpus_per_node']
    assert subprocess.check_output(command, env=variables, text=True).strip() == workers


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
) -> None:
    job = parse(command_of('slurm_pretrain.sbatch', elsewhere, **variables)[3:])
    step = slurm_step('n1', Address('here', 1, b''), job.step_flags, job.agent_python)
    step.close(60.0)
    asked = (elsewhere.parent / 'bin' / 'srun.asked').read_text().splitlines()
    assert asked[-len(python) - 2 :] == [*python, '-m', 'moevement_ext.launch.agent']
    assert '--nodelist=n1' in asked and [flag for flag in asked if 'container' in flag] == flags


def test_words_in_quotes_stay_together(elsewhere: Path) -> None:
    """The launcher splits these variables in the same way."""
    given = {'AGENT_PYTHON': APPTAINER, 'DRILL': '--text "two words"'}
    words = command_of('slurm_drill.sbatch', elsewhere, **given)
    assert words[words.index('--text') + 1 :][:2] == ['two words', '--']


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
