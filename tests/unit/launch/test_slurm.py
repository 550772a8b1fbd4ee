# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.launch import slurm
from moevement_ext.launch.launch_config import StagedAction, StagedFault
from moevement_ext.launch.launcher_events import RanksNeeded
from moevement_ext.launch.slurm import main, parse
from moevement_ext.launch.supervisor import Supervisor
from tests.unit.launch.on_hosts import SlurmJob

pytestmark = pytest.mark.timeout(300)
JOB = SlurmJob
SCONTROL = """#!/usr/bin/env bash
case "$1" in
    show) [[ $2 == job ]] || printf '%s\\n' node-a node-b node-c ;;
    requeue) echo "$2" >> "$0.requeued" ;;
    update) echo "$3" >> "$0.updated" ;;
esac
"""
# `srun` that starts an agent on node-a only.
ONE_AGENT = """#!/usr/bin/env bash
[[ $* == *--nodelist=node-a* ]] || exit 1
while [[ $1 == --* ]]; do shift; done
SLURMD_NODENAME=node-a exec "$@"
"""


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An allocation of three nodes as fake Slurm commands show it; `srun` reaches none."""
    programs = tmp_path / 'bin'
    programs.mkdir()
    ends = '#!/usr/bin/env bash\nexit '
    for name, text in (('scontrol', SCONTROL), ('srun', f'{ends}1\n'), ('squeue', f'{ends}0\n')):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv('PATH', f'{programs}:/usr/bin:/bin')
    monkeypatch.setenv('SLURM_JOB_NODELIST', 'node-[a-c]')
    monkeypatch.setenv('SLURM_JOB_ID', '42')
    return programs / 'scontrol'


def test_flags(job: SlurmJob, scontrol: Path) -> None:
    own = (
        '--spare-nodes 1 --workers-per-node 8 --max-restarts 4 --requeue --grace 20 --log-dir logs '
        '--kill 3@8 --before-end 120'
    )
    found = parse([*own.split(), '--', str(job.program), '--grace', '3'])
    assert found.hosts == ('node-a', 'node-b', 'node-c')
    assert found.requeue and found.before_end_s == 120.0
    launch = found.launch
    assert (launch.nodes, launch.workers_per_node, launch.world_size) == (2, 8, 16)
    assert (launch.max_restarts, launch.grace_s, launch.log_dir) == (4, 20.0, Path('logs'))
    assert launch.faults == (StagedFault(StagedAction.KILL, 3, 8),)
    assert (launch.program, launch.flags) == (str(job.program), ('--grace', '3'))


@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        ('--spare-nodes 1', 'no program: put --, the program and its flags'),
        ('--spare-nodes 3 -- PROGRAM', '--spare-nodes 3 must be at least 0 and leave a node'),
        ('--spare-nodes -1 -- PROGRAM', '--spare-nodes -1 must be at least 0'),
        ('--workers-per-node 0 -- PROGRAM', '--workers-per-node 0 must be at least 1'),
        ('--grace -1 -- PROGRAM', '--grace -1.0 must be at least 0'),
        ('--before-end -1 -- PROGRAM', '--before-end -1.0 must be at least 0'),
        ('-- nowhere.py', 'nowhere.py: no such program'),
        ('--log-dir /proc/none -- PROGRAM', '--log-dir /proc/none: no log can be written there'),
    ],
)
def test_invalid_flags_are_named(
    flags: str, message: str, job: SlurmJob, scontrol: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags.replace('PROGRAM', str(job.program)).split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_unknown_allocation_is_refused(
    job: SlurmJob, scontrol: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scontrol.write_text('#!/usr/bin/env bash\necho Invalid hostlist >&2\nexit 1\n')
    with pytest.raises(SystemExit) as stopped:
        parse(['--', str(job.program)])
    assert stopped.value.code == 2
    assert 'node-[a-c] failed (Invalid hostlist)' in capsys.readouterr().err


def test_launcher_outside_of_slurm_is_refused(
    job: SlurmJob, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv('SLURM_JOB_NODELIST', raising=False)
    with pytest.raises(SystemExit):
        parse(['--', str(job.program)])
    assert 'SLURM_JOB_NODELIST is not set: this runs in a batch script' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('code', 'flags', 'requeued'),
    [
        (EXIT_WHOLE_JOB, ['--requeue'], True),
        (EXIT_WHOLE_JOB, [], False),
        (1, ['--requeue'], False),
    ],
)
def test_only_a_lost_node_requeues_the_job(
    code: int,
    flags: list[str],
    requeued: bool,
    job: SlurmJob,
    scontrol: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Supervisor, 'run', lambda self: code)
    assert main([*flags, '--', str(job.program)]) == code
    noted = scontrol.with_name('scontrol.requeued')
    assert noted.exists() is requeued
    if requeued:
        assert noted.read_text() == '42\n'


def test_job_that_needs_more_ranks_is_requeued_with_more_nodes(
    job: SlurmJob, scontrol: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spare node is requested again."""

    def run(supervisor: Supervisor) -> int:
        supervisor._report(RanksNeeded(9))
        return EXIT_WHOLE_JOB

    monkeypatch.setattr(Supervisor, 'run', run)
    flags = ['--requeue', '--spare-nodes', '1', '--workers-per-node', '4', '--', str(job.program)]
    assert main(flags) == EXIT_WHOLE_JOB
    assert scontrol.with_name('scontrol.requeued').read_text() == '42\n'
    assert scontrol.with_name('scontrol.updated').read_text() == 'NumNodes=4-4\n'


def test_host_without_an_agent_is_excluded_on_requeue(
    job: SlurmJob,
    scontrol: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slurm considers it healthy. The number of such requeues is bounded."""
    monkeypatch.setattr(slurm, '_TO_NOTICE_S', 0.0)
    for name, text in (('srun', ONE_AGENT), ('squeue', '#!/usr/bin/env bash\necho nodes\n')):
        scontrol.with_name(name).write_text(text)
    monkeypatch.setenv('SLURM_RESTART_COUNT', '9')
    assert main(['--requeue', '--', str(job.program)]) == EXIT_WHOLE_JOB
    assert scontrol.with_name('scontrol.requeued').read_text() == '42\n'
    assert scontrol.with_name('scontrol.updated').read_text() == 'ExcNodeList=node-b,node-c\n'
    assert 'host node-b is not reached: its step ended with status 1' in capsys.readouterr().err

    scontrol.with_name('scontrol.requeued').unlink()
    monkeypatch.setenv('SLURM_RESTART_COUNT', '10')
    assert main(['--requeue', '--', str(job.program)]) == EXIT_WHOLE_JOB
    assert not scontrol.with_name('scontrol.requeued').exists()
    said = capsys.readouterr().err
    assert 'Slurm has restarted the job 10 times, and again no worker' in said
    assert 'submit it with --exclude=node-b,node-c' in said


def test_job_without_a_reachable_host_is_not_requeued(
    job: SlurmJob, scontrol: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No node can run anything, which a requeue would not repair."""
    assert main(['--requeue', '--', str(job.program)]) == 1
    assert 'node-b: its step ended with status 1' in capsys.readouterr().err
    assert not scontrol.with_name('scontrol.requeued').exists()


def test_invalid_flag_of_the_program_is_named(
    job: SlurmJob, scontrol: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(['--', str(job.program), '--sparse-ckpt-store', 'nowhere'])
    assert stopped.value.code == 2
    assert '--sparse-ckpt-store' in capsys.readouterr().err
