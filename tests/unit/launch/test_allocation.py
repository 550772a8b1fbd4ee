# SPDX-License-Identifier: Apache-2.0
"""Requeueing, with scripts in place of Slurm's commands."""

import math
from pathlib import Path

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.launch import slurm
from moevement_ext.launch.launch_config import unnamed_run_id
from moevement_ext.launch.launcher_events import NodeLost, NodeReady, WorkerLaunched
from moevement_ext.launch.slurm import RequeueState, go_back

pytestmark = pytest.mark.timed

# Requests are recorded; the first of each kind fails, as when Slurm ends a command with the job.
SCONTROL = """\
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
    for name, text in (('scontrol', SCONTROL), ('squeue', SQUEUE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    monkeypatch.setattr(slurm, '_POLL_S', 0.01)
    monkeypatch.setattr(slurm, '_PAUSE_S', 0.01)
    return tmp_path


def test_wait_until_slurm_has_noticed_the_lost_nodes(programs: Path) -> None:
    (programs / 'squeue.nodes').write_text('a,b,c\na,b\na\n')
    assert slurm.wait_until_noticed('42', {'b', 'd'}) == set()
    assert (programs / 'squeue.nodes').read_text() == 'a\n'


def test_wait_for_slurm_to_notice_is_bounded(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, '_TO_NOTICE_S', 0.05)
    (programs / 'squeue.nodes').write_text('a,b\n')
    assert slurm.wait_until_noticed('42', {'b', 'c'}) == {'b'}


def test_job_without_nodes_has_no_unnoticed_node(programs: Path) -> None:
    (programs / 'squeue.nodes').write_text('\n')
    assert slurm.wait_until_noticed('42', {'b'}) == set()


@pytest.mark.parametrize('lost', [{'b'}, set()])
def test_unresponsive_controller_is_waited_for(programs: Path, lost: set[str]) -> None:
    """It could not requeue the job."""
    (programs / 'squeue.nodes').write_text('silence\nsilence\na\n')
    assert slurm.wait_until_noticed('42', lost) == set()
    assert (programs / 'squeue.nodes').read_text() == 'a\n'


def test_requeued_job_excludes_unusable_nodes(programs: Path) -> None:
    """Nodes excluded at submission stay excluded."""
    assert slurm.requeue('42', {'c', 'b'})
    assert (programs / 'scontrol.requeued').read_text() == '42\n'
    assert (programs / 'scontrol.updated').read_text() == 'JobId=42 ExcNodeList=x[1-2],b,c\n'


def test_requeue_command_killed_by_slurm_counts_as_done(programs: Path) -> None:
    kill = "'requeue '*) kill -9 $$ ;;"
    (programs / 'scontrol').write_text(SCONTROL.replace("'requeue '*)", kill + " 'again '*)"))
    assert slurm.requeue('42', {'b'})
    assert (programs / 'scontrol.updated').exists()


def test_requeued_job_requests_the_number_of_nodes(programs: Path) -> None:
    slurm.requeue('42', {'b'}, nodes=4)
    assert (programs / 'scontrol.updated').read_text() == (
        'JobId=42 ExcNodeList=x[1-2],b NumNodes=4-4\n'
    )


def test_requeue_changes_nothing_else(programs: Path) -> None:
    assert slurm.requeue('42', set())
    assert (programs / 'scontrol.requeued').exists()
    assert not (programs / 'scontrol.updated').exists()


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
    go_back(history, lambda ranks: ranks)
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


def test_missing_slurm_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(ConfigurationError, match="No such file.*: 'scontrol'.*in PATH"):
        slurm.hostnames('n[1-2]')


def test_slurm_error_about_unknown_nodes_is_passed_on(programs: Path) -> None:
    (programs / 'scontrol').write_text('#!/bin/sh\necho Invalid hostlist >&2\nexit 1\n')
    with pytest.raises(ConfigurationError, match=r'show hostnames n\[ failed \(Invalid hostlist'):
        slurm.hostnames('n[')
