# SPDX-License-Identifier: Apache-2.0
"""Workers of torchrun's agents that are forks of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moevement_ext.launch.torchrun_workers import _Source

pytestmark = pytest.mark.timed

PROGRAM = """
import os, signal, sys, threading, time
import psutil

{declaration}
with open(sys.argv[1], 'a') as imports:
    imports.write('t' if 'torch' in sys.modules else '.')
{at_import}

def main():
    rank, attempt = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']
    print(f'out of {{rank}}')
    print(f'err of {{rank}}', file=sys.stderr)
    if attempt == '1':
        sys.exit(0)
    if rank == '0':
        open(sys.argv[1] + '-0', 'w').close()
    else:
        while not os.path.exists(sys.argv[1] + '-0'):  # the agent ends rank 0 at this death
            time.sleep(0.01)
        if {kills_template}:
            started = psutil.Process().parent().children()
            min(started, key=psutil.Process.create_time).kill()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)

if __name__ == '__main__':
    main()
{at_end}
"""
DECLARED = 'MOEVEMENT_SPARES = True'
THREAD = 'threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()'
NEEDS_RANK = "assert 'RANK' in os.environ"
TORCH = ['torch.distributed.run', '--logs-specs', 'moevement']
OURS = ['moevement_ext.launch.torchrun']
TO_END_S = 120


@pytest.mark.parametrize(
    ('launcher', 'program', 'imported', 'why'),
    [
        (TORCH, {}, '.', None),
        (OURS, {}, 't', None),
        (OURS, {'kills_template': True}, 't.', None),
        (OURS, {'at_import': THREAD}, 't...', 'starts threads or uses a GPU'),
        (OURS, {'declaration': ''}, '....', 'does not declare'),
        (OURS, {'at_end': 'main'}, '....', 'as the last statement'),
        (OURS, {'at_import': NEEDS_RANK}, 't....', 'in advance fails'),
    ],
    ids=[
        *('torchrun', 'ours', 'template killed', 'not to be forked', 'not declared'),
        *('no guard', 'import fails'),
    ],
)
def test_one_import_serves_all_workers_of_an_agent(
    launcher: list[str],
    program: dict[str, object],
    imported: str,
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first attempt of two workers, and the second, which follows a SIGKILL.

    Each import writes a letter: t where it is in a fork of the agent, which has imported torch.
    """
    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)  # torch would start a thread
    path, imports, logs = tmp_path / 'program.py', tmp_path / 'imports', tmp_path / 'logs'
    given = dict.fromkeys(('at_import', 'at_end'), '') | {'kills_template': False}
    given |= {'declaration': DECLARED} | program
    path.write_text(PROGRAM.format(**given))
    command = [sys.executable, '-m', *launcher, '--standalone', '--nproc-per-node', '2']
    command += ['--max-restarts', '1', '--redirects', '3', '--log-dir', str(logs)]
    command += [str(path), str(imports)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TO_END_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert 'exitcode: -9' in ended.stderr
    assert imports.read_text() == imported
    for stream in ('out', 'err'):
        written = sorted(file.read_text() for file in logs.rglob(f'attempt_*/*/std{stream}.log'))
        assert written == [f'{stream} of {rank}\n' for rank in (0, 0, 1, 1)]
    assert ended.stderr.count('starts as a new interpreter: ') == (why is not None)
    assert why is None or why in ended.stderr


def test_program_named_as_a_module_starts_fresh(capfd: pytest.CaptureFixture[str]) -> None:
    with open(os.devnull, 'w') as nowhere:
        command = [sys.executable, '-u', '-m', 'program', 'flag']
        assert _Source().start(command, {}, nowhere, nowhere) is None
    assert 'as a new interpreter: name its file, not its module' in capfd.readouterr().err
