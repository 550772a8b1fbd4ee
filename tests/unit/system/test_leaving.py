# SPDX-License-Identifier: Apache-2.0
"""The process exits with its status although a thread in torch wakes up during finalization."""

import os
import subprocess
import sys
from datetime import timedelta
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import EXIT_USER_ERROR, HostMemoryError, SparseCheckpointError
from moevement_ext.memory.holder_lock import StoreInUseError
from moevement_ext.system.leaving import in_one_line

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[3]

# The object is deleted during finalization, which takes long enough for the thread to wake up.
PROGRAM = """
import atexit, sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from moevement_ext.errors import UserError
from moevement_ext.system.leaving import leave, leave_in_any_case

store = TCPStore('127.0.0.1', int(sys.argv[1]), is_master=False)


class Late:
    def __del__(self, tell=store.clone().set, sleep=time.sleep):
        tell('broken', '1')
        sleep(1.0)


def wait():
    store.wait(['broken'], timedelta(days=1))


threading.Thread(target=wait, daemon=True).start()
last = threading.Event()
threading.Thread(target=lambda: (last.wait(), time.sleep(0.1), print('worker is done'))).start()
atexit.register(print, 'written at exit')
sys.late = Late()
time.sleep(0.2)


def end(how):
    if how == 'leave':
        last.set()
        leave(16)
    if how == 'exit':
        sys.exit(7)
    if how == 'exit with words':
        sys.exit('it failed')
    if how == 'error':
        raise ValueError('it failed')
    if how == 'user error':
        raise UserError('it failed')


leave_in_any_case()
leave_in_any_case()
try:
    end(sys.argv[2])
finally:
    print('last')
    last.set()
"""


@pytest.mark.parametrize(
    ('how', 'code', 'lines'),
    [
        ('leave', 16, 0),
        ('return', 0, 0),
        ('exit', 7, 0),
        ('exit with words', 1, 1),
        ('error', 1, 6),
        ('user error', 2, 1),
    ],
)
def test_waiting_threads_do_not_abort_the_process(
    how: str, code: int, lines: int, tmp_path: Path
) -> None:
    """An ordinary end of the program aborts with current CPython."""
    program = tmp_path / 'program.py'
    program.write_text(PROGRAM)
    store = TCPStore(
        '127.0.0.1', 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    done = subprocess.run(
        [sys.executable, str(program), str(store.port), how],
        capture_output=True,
        text=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        check=False,
    )
    assert done.returncode == code, done.stderr
    last = 'last\n' if how != 'leave' else ''
    assert done.stdout == last + 'worker is done\nwritten at exit\n'
    said = [line for line in done.stderr.splitlines() if not line.startswith('[W')]  # torch's
    assert len(said) == lines
    assert ('it failed' in done.stderr) == bool(lines)


LIKE_A_GREENLET = """
import _thread, sys, threading
from moevement_ext.system.leaving import leave_in_any_case

def outermost():
    threading._main_thread = threading.current_thread()
    raise ValueError('handled by the caller in C')

failed, main = threading.Event(), threading.main_thread()
sys.unraisablehook = lambda unraisable: failed.set()
leave_in_any_case()
_thread.start_new_thread(outermost, ())
failed.wait()
threading._main_thread = main
sys.exit(5)
"""


def test_only_the_outermost_frame_of_the_program_ends_it() -> None:
    """A greenlet runs in the main thread, too, and its first frame has no caller."""
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    command = [sys.executable, '-c', LIKE_A_GREENLET]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, timeout=100.0)
    assert done.returncode == 5 and b'handled' not in done.stderr


_ENDS = """
import threading
from moevement_ext.system.leaving import end_at_once

print('lost', end='')
threading.Thread(target=end_at_once, args=(77,)).start()
threading.Event().wait()
"""


def test_process_with_unwritable_output_ends() -> None:
    """Its log is on a full disk; buffered output must not prevent a thread from ending it."""
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'PYTHONUNBUFFERED': ''}
    with open('/dev/full', 'w') as full:
        done = subprocess.run(
            [sys.executable, '-c', _ENDS], stdout=full, env=environment, timeout=100.0
        )
    assert done.returncode == 77


SAID = '--flag must be 1; leave it out'


@pytest.mark.parametrize(
    ('error', 'module', 'program'),
    [
        (ConfigurationError(SAID), None, 'train.py'),
        (
            HostMemoryError(SAID),
            ModuleSpec('some.program.__main__', None),
            'python -m some.program',
        ),
        (StoreInUseError(SAID, 1.0), ModuleSpec('some.trainer', None), 'python -m some.trainer'),
    ],
)
def test_user_error_ends_the_program_with_one_line_and_status_2(
    error: Exception,
    module: ModuleSpec | None,
    program: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr('sys.argv', ['/somewhere/train.py', '--flag'])
    monkeypatch.setattr(sys.modules['__main__'], '__spec__', module)
    with pytest.raises(SystemExit) as ended, in_one_line():
        raise error
    assert ended.value.code == EXIT_USER_ERROR == 2
    assert capsys.readouterr().err == f'{program}: error: {SAID}\n'


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(SparseCheckpointError), in_one_line():
        raise SparseCheckpointError('a bug')
