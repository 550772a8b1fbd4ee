# SPDX-License-Identifier: Apache-2.0
import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moevement_ext import faults
from moevement_ext.config import ConfigurationError
from moevement_ext.faults import Phase

pytestmark = pytest.mark.timed

REPOSITORY = Path(__file__).parents[2]

_WORKER = """
from moevement_ext import faults
from moevement_ext.faults import Phase
faults.arm(1)
print('armed' if faults.armed() else 'not armed', flush=True)
for iteration in (2, 3, 4):
    faults.at_iteration(iteration)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        faults.point(phase)
        print(iteration, phase, flush=True)
"""


def work(fail_at: str | None, attempt: int = 0) -> tuple[list[str], int]:
    """What a worker of rank 1 says, and its exit status."""
    environment = {**os.environ, 'TORCHELASTIC_RESTART_COUNT': str(attempt)}
    environment.pop('MOEVEMENT_FAIL_AT', None)
    if fail_at is not None:
        environment['MOEVEMENT_FAIL_AT'] = fail_at
    done = subprocess.run(
        [sys.executable, '-c', _WORKER],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout.splitlines(), done.returncode


ALL = ['2 forward', '2 backward', '3 forward', '3 backward', '4 forward', '4 backward']


@pytest.mark.parametrize(
    ('fail_at', 'attempt'),
    [('1:3:backward', 0), ('0:2:forward,1:3:backward:0', 0), ('1:3:backward:2,1:2:forward', 2)],
)
def test_armed_process_is_killed_at_the_point(fail_at: str, attempt: int) -> None:
    said, status = work(fail_at, attempt)
    assert status == -signal.SIGKILL
    assert said == ['armed', *ALL[:3]]


@pytest.mark.parametrize(
    ('fail_at', 'attempt'),
    [(None, 0), ('0:3:forward', 0), ('1:3:forward', 1), ('1:3:forward:1', 0)],
)
def test_another_rank_or_attempt_is_left_alone(fail_at: str | None, attempt: int) -> None:
    assert work(fail_at, attempt) == (['not armed', *ALL], 0)


def test_unreached_iteration_or_phase_kills_no_process() -> None:
    assert work('1:9:forward,1:3:optimizer') == (['armed', *ALL], 0)


def phases_of_points(source: str) -> list[Phase]:
    """The phases that the calls of `faults.point` in a source name, in any part of the argument."""
    return [
        Phase[name.attr]
        for call in ast.walk(ast.parse(source))
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ('faults.point', 'point')
        for name in ast.walk(call.args[0])
        if isinstance(name, ast.Attribute) and ast.unparse(name.value) == 'Phase'
    ]


def test_every_phase_is_one_place_in_the_product() -> None:
    """A loop of one's own has points of its own, in place of the adapter's."""
    product = [*REPOSITORY.glob('moevement_ext/**/*.py'), *REPOSITORY.glob('megatron/**/*.py')]
    own = 'torch_loop', 'after_steps.py'
    product = [source for source in product if not set(own) & set(source.parts)]
    points = [phase for source in product for phase in phases_of_points(source.read_text('utf-8'))]
    assert sorted(points) == sorted(Phase)


def test_phase_is_armed_and_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(faults, '_armed', [])
    monkeypatch.setenv('MOEVEMENT_FAIL_AT', f'99:7:{Phase.FORWARD}')
    faults.arm(99)
    assert faults._armed == [faults.Fault(7, Phase.FORWARD)]
    (warning,) = caplog.records
    assert warning.levelname == 'WARNING'
    assert f'rank 99 kills itself in iteration 7, phase {Phase.FORWARD}' in warning.getMessage()


@pytest.mark.parametrize(
    'text', ['1', '1:3:nowhere', '1:3:forward:0:0', '1:3:forward:z', '-1:3:forward']
)
def test_malformed_variable_is_named_with_its_format(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('MOEVEMENT_FAIL_AT', text)
    with pytest.raises(
        ConfigurationError, match=r"MOEVEMENT_FAIL_AT='.*expected <rank>:<iteration>:"
    ):
        faults.arm(99)


def test_loading_waits_as_long_as_the_file_is_there(tmp_path: Path) -> None:
    stall = tmp_path / 'stall'
    program = (
        'import os\nfrom moevement_ext import faults\n'
        f"open(f'{stall}.{{os.getpid()}}', 'w').close()\n"
        "print('loading', flush=True)\nfaults.stall()\nprint('loaded', flush=True)"
    )
    environment = {**os.environ, 'MOEVEMENT_STALL_FILE': str(stall)}
    command = [sys.executable, '-c', program]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == 'loading\n'
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.5)
        Path(f'{stall}.{worker.pid}').unlink()
        assert worker.stdout.read() == 'loaded\n'
