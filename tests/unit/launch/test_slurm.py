# SPDX-License-Identifier: Apache-2.0

import math
from pathlib import Path

import pytest

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.launch import slurm
from moevement_ext.launch.launch_config import StagedAction, StagedFault, unnamed_run_id
from moevement_ext.launch.launcher_events import NodeLost, NodeReady, WorkerLaunched
from moevement_ext.launch.slurm import RequeueState, go_back, main, parse
from moevement_ext.launch.supervisor import Supervisor
from tests.support.messages import messages
from tests.unit.launch.on_hosts import SlurmJob

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
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


@pytest.mark.parametrize(('flags', 'message'), messages('slurm'))
def test_invalid_flags_are_named(
    flags: str, message: str, job: SlurmJob, scontrol: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags.replace('PROGRAM', str(job.program)).split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


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


def test_host_without_an_agent_is_excluded_on_requeue(
    job: SlurmJob,
    scontrol: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
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


# Requests are recorded; the first of each kind fails, as when Slurm ends a command with the job.
SCONTROL_OF_NODES = """\
#!/usr/bin/env bash
case "$1 $2" in
    'requeue '*) if mkdir "$0.asked"; then exit 1; fi; echo "$2" >"$0.requeued" ;;
    'show job') echo '   ReqNodeList=(null) ExcNodeList=x[1-2]' ;;
    'show hostnames') tr , '\\n' <<<"$3" ;;
    update*) if mkdir "$0.tried"; then exit 1; fi; echo "${@:2}" >"$0.updated" ;;
esac
"""
# The file has the nodes of the job, one line per query; the last line stays.
SQUEUE = """\
#!/usr/bin/env bash
nodes=$(head -n 1 "$0.nodes")
(($(wc -l <"$0.nodes") == 1)) || sed -i 1d "$0.nodes"
if [[ $nodes == silence ]]; then echo 'Unable to contact slurm controller' >&2; exit 1; fi
echo "$nodes"
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (('scontrol', SCONTROL_OF_NODES), ('squeue', SQUEUE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    monkeypatch.setattr(slurm, '_POLL_S', 0.01)
    monkeypatch.setattr(slurm, '_PAUSE_S', 0.01)
    return tmp_path


@pytest.mark.parametrize(
    ('answers', 'lost', 'sound'),
    [
        (['a,b,c', 'a,b', 'a'], {'b', 'd'}, set()),
        (['a,b'], {'b', 'c'}, {'b'}),  # it has not noticed in time
        ([''], {'b'}, set()),
        (['silence', 'silence', 'a'], {'b'}, set()),  # it could not requeue the job
        (['silence', 'silence', 'a'], set(), set()),
    ],
)
def test_lost_nodes_are_awaited_until_slurm_has_noticed(
    answers: list[str],
    lost: set[str],
    sound: set[str],
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm, '_TO_NOTICE_S', 0.05 if sound else 600.0)
    (programs / 'squeue.nodes').write_text(''.join(f'{answer}\n' for answer in answers))
    assert slurm.wait_until_noticed('42', lost) == sound
    assert (programs / 'squeue.nodes').read_text() == f'{answers[-1]}\n'


@pytest.mark.parametrize(
    ('excluded', 'updated'),
    [
        ({'c', 'b'}, 'JobId=42 ExcNodeList=x[1-2],b,c\n'),  # those of the submission stay
        (set(), None),
    ],
)
def test_requeue_changes_what_it_must(
    excluded: set[str], updated: str | None, programs: Path
) -> None:
    assert slurm.requeue('42', excluded)
    assert (programs / 'scontrol.requeued').read_text() == '42\n'
    noted = programs / 'scontrol.updated'
    assert (noted.read_text() if noted.exists() else None) == updated


def test_failed_requeue_leaves_the_job_unchanged(
    programs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (programs / 'scontrol').write_text('#!/bin/sh\necho "$1" >>"$0.asked"\nexit 1\n')
    (programs / 'squeue.nodes').write_text('\n')
    monkeypatch.setenv('SLURM_JOB_ID', '42')
    monkeypatch.setenv('SLURM_RESTART_COUNT', '1000')  # no limit, once a worker has started
    history = RequeueState()
    for event in (NodeLost('a', 0, 'x'), NodeLost('b', 0, 'x'), NodeReady('a')):
        history.note(event)
    history.note(WorkerLaunched(0, 1, 0, was_spare=False))
    assert history.lost == {'b'}, 'the other host is back'
    go_back(history)
    assert 'update' not in (programs / 'scontrol.asked').read_text()
    said = ''.join(capfd.readouterr())
    assert 'requeue 42 failed. Submit the job again with the same flags and --sparse-ckpt-r' in said
    assert '--sparse-ckpt-run-id slurm-42: it finds its windows.' in said


@pytest.mark.parametrize(
    ('job', 'flags', 'run_id'),
    [
        ('42', [], 'slurm-42'),
        ('42', ['--sparse-ckpt-run-id', 'mine'], None),
        ('42', ['--sparse-ckpt-run-id=mine'], None),
        (None, [], None),
    ],
)
def test_another_job_of_slurm_must_name_the_run(
    job: str | None, flags: list[str], run_id: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv('SLURM_JOB_ID', raising=False)
    if job is not None:
        monkeypatch.setenv('SLURM_JOB_ID', job)
    assert unnamed_run_id(flags) == run_id


@pytest.mark.parametrize(
    ('shown', 'seconds'),
    [
        ('0:05', 5.0),
        ('2:03', 123.0),
        ('1:02:03', 3723.0),
        ('2-01:02:03', 176523.0),
        ('UNLIMITED', math.inf),
        ('INVALID', None),
        ('silence', None),
    ],
)
def test_remaining_time_is_parsed(programs: Path, shown: str, seconds: float | None) -> None:
    (programs / 'squeue.nodes').write_text(f'{shown}\n')
    assert slurm._seconds_left('42') == seconds


def test_changed_time_limit_is_respected(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is extended meanwhile, and the controller does not answer at the end."""
    waits: list[float] = []
    now = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds

    monkeypatch.setattr(slurm.time, 'monotonic', lambda: now)
    monkeypatch.setattr(slurm.time, 'sleep', sleep)
    (programs / 'squeue.nodes').write_text('silence\n3:10\n4:00\nsilence\n')
    called: list[float] = []
    slurm.call_before_end('42', 120.0, lambda: called.append(now))
    assert waits == [60.0, 60.0, 60.0, 60.0]
    assert called == [1000.0 + 60.0 + 60.0 + 240.0 - 120.0]
