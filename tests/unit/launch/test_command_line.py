# SPDX-License-Identifier: Apache-2.0
"""The command line: its flags, and that no process outlives it."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from moevement_ext.launch.command_line import main, parse
from moevement_ext.launch.launch_config import GUESTS, StagedAction, StagedFault
from tests.support.messages import messages
from tests.support.quick import with_quick
from tests.support.readable import dies
from tests.unit.launch.conftest import Job

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
TO_END_S = 120
COMMAND = [sys.executable, '-m', 'moevement_ext.launch.command_line']


def test_flags(job: Job) -> None:
    program = str(job.program)
    own = '--nodes 2 --workers-per-node 3 --spares 1 --max-restarts 4 --log-dir logs --share-gpu'
    struck = '--kill 0@1 5@2 --kill 1@9 --kill-node 1@3 --stop 2@4'
    struck += ' --lose-node 0@5 --return-node 0@6 --when-no-spare guests'
    config = parse([*own.split(), *struck.split(), '--', program, '--nodes', '--', 'x'])
    assert (config.program, config.flags) == (program, ('--nodes', '--', 'x'))
    assert (config.nodes, config.workers_per_node, config.world_size) == (2, 3, 6)
    assert (config.spares, config.max_restarts, config.log_dir) == (1, 4, Path('logs'))
    assert config.share_gpu and config.when_no_spare == GUESTS
    assert not parse(['--nodes', '1', '--fork', '--', program]).share_gpu
    assert config.faults == (
        StagedFault(StagedAction.KILL, 0, 1),
        StagedFault(StagedAction.KILL, 5, 2),
        StagedFault(StagedAction.KILL, 1, 9),
        StagedFault(StagedAction.KILL_NODE, 1, 3),
        StagedFault(StagedAction.LOSE_NODE, 0, 5),
        StagedFault(StagedAction.RETURN_NODE, 0, 6),
        StagedFault(StagedAction.STOP, 2, 4),
    )


DECLARED = 'MOEVEMENT_SPARES = True\n'
GUARD = 'if "__main__" == __name__: pass\nif __name__ == "__main__":\n    train()\n'


@pytest.mark.parametrize(
    ('text', 'declares'),
    [
        (DECLARED + GUARD, True),
        (GUARD, False),
        ('MOEVEMENT_SPARES = False\n' + GUARD, False),
        (f'if True:\n    {DECLARED}{GUARD}', False),
        ('train()', False),
        ('if', False),
    ],
)
def test_spares_need_a_declaration(
    text: str, declares: bool, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.program.write_text(text)
    launched = ['--', str(job.program)]
    found = parse(['--nodes', '1', *launched])
    assert (found.spares, found.importable) == (int(declares), declares)
    fresh = f'every worker starts fresh: declare MOEVEMENT_SPARES = True in {job.program}\n'
    said = capsys.readouterr().err
    assert said.endswith(fresh) if not declares else said == ''
    assert parse(['--nodes', '1', '--spares', '0', *launched]).spares == 0
    asked = ['--nodes', '1', '--spares', '2', *launched]
    if declares:
        assert parse(asked).spares == 2
        return
    with pytest.raises(SystemExit):
        parse(asked)
    refused = f'--spares 2: {job.program} does not declare MOEVEMENT_SPARES = True'
    assert refused in capsys.readouterr().err


@pytest.mark.parametrize('end', ['train()', GUARD + 'print("trained")', 'if __name__: train()'])
def test_spares_need_a_main_guard_at_the_end(
    end: str, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.program.write_text(DECLARED + end)
    with pytest.raises(SystemExit):
        parse(['--nodes', '1', '--', str(job.program)])
    assert (
        f'{job.program}: MOEVEMENT_SPARES = True needs "if __name__ == \'__main__\':" as the last '
    ) in capsys.readouterr().err


@pytest.mark.parametrize(('flags', 'message'), messages('launch'))
def test_invalid_flags_are_named(
    flags: str, message: str, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([str(job.program) if word == 'PROGRAM' else word for word in flags.split()])
    assert refused.value.code == 2
    assert message.replace('PROGRAM', str(job.program)) in capsys.readouterr().err


def test_worker_of_a_spare_that_the_launcher_forks_is_as_a_new_process(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    program = job.program.read_text()
    seen = "sys.modules['__main__'] is sys.modules[__name__], sorted(sys.modules), sys.path"
    job.program.write_text(program.replace('imported = {', f"imported = {{'seen': [{seen}], "))
    job.finish()
    fresh, forked = [], []
    for spares, attempt in (('0', fresh), ('1', forked)):
        command = [*COMMAND, '--nodes', '1', '--spares', spares, '--', str(job.program), 'x']
        output = subprocess.check_output(command, text=True, timeout=TO_END_S)
        assert output.count('importing') == 1
        found = job.attempt(0)
        main, modules, path = found['imported']['seen']
        left = {name.partition('.')[0] for name in modules}
        attempt += [found['argv'], found['env'].keys(), main, path, left & {'moevement_ext'}]
        assert found['env']['OMP_NUM_THREADS'] == '1'
        assert ('torch' in left) is (spares == '1')
        assert (found['imported']['rank'] is None) is (spares == '1')
    assert forked == fresh


@contextmanager
def launched(job: Job) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """The command with two workers and a spare, after all of them have started their program."""
    flags = ['--nodes', '2', '--', str(job.program), '1.0=print:two words']
    command = [*COMMAND, *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        family: list[psutil.Process] = []
        try:
            assert process.stdout is not None
            wanted = {'importing', '[rank 1] two words', 'rank 0: started'}
            while wanted:
                line = process.stdout.readline()
                assert line, f'ended without {wanted}'
                line = re.sub(r'^\[launcher \d\d:\d\d:\d\d\]', '[launcher]', line)
                wanted -= {text for text in wanted if text in line}
            family = psutil.Process(process.pid).children()
            yield process, family
        finally:
            process.kill()
            for worker in family:
                with suppress(psutil.NoSuchProcess):
                    worker.kill()


def test_all_processes_die_with_a_killed_launcher(job: Job) -> None:
    with launched(job) as (process, family):
        assert len(family) == 3
        process.kill()
        assert all(dies(worker.pid) for worker in family)


@pytest.fixture
def in_a_terminal() -> Iterator[None]:
    """Restore SIGHUP: under `nohup`, processes start with it ignored, which launchers respect."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures('in_a_terminal')
@pytest.mark.parametrize(
    'asked',
    with_quick([signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2], signal.SIGINT),
    ids=lambda asked: asked.name,
)
def test_interrupt_ends_all_workers(job: Job, asked: signal.Signals) -> None:
    """A hangup and a repeated interrupt do the same."""
    with launched(job) as (process, family):
        process.send_signal(asked)
        process.send_signal(asked)
        assert process.wait(120) == 128 + asked
        assert psutil.wait_procs(family, timeout=0)[1] == []
        assert process.stdout is not None
        assert 'rank 0 (pid' in process.stdout.read()


def test_full_disk_at_the_end_does_not_change_the_exit_status(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv('PYTHONUNBUFFERED', raising=False)
    job.program.write_text("print('trained')")
    with open('/dev/full', 'w') as full:
        command = [*COMMAND, '--nodes', '1', '--', str(job.program)]
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 0
