# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import EXIT_USER_ERROR, HostMemoryError, SparseCheckpointError
from moevement_ext.memory.holder_lock import StoreInUseError
from moevement_ext.system.user_errors import in_one_line


@pytest.mark.parametrize(
    ('kind', 'module', 'program'),
    [
        (ConfigurationError, None, 'train.py'),
        (HostMemoryError, ModuleSpec('some.program.__main__', None), 'python -m some.program'),
        (StoreInUseError, ModuleSpec('some.trainer', None), 'python -m some.trainer'),
    ],
)
def test_user_error_ends_the_program_with_one_line_and_status_2(
    kind: type[Exception],
    module: ModuleSpec | None,
    program: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr('sys.argv', ['/somewhere/train.py', '--flag'])
    monkeypatch.setattr(sys.modules['__main__'], '__spec__', module)
    with pytest.raises(SystemExit) as ended, in_one_line():
        raise kind('--flag must be 1; leave it out')
    assert ended.value.code == EXIT_USER_ERROR == 2
    assert capsys.readouterr().err == f'{program}: error: --flag must be 1; leave it out\n'


def test_other_errors_keep_their_traceback() -> None:
    with pytest.raises(SparseCheckpointError), in_one_line():
        raise SparseCheckpointError('a bug')


@pytest.mark.parametrize('error, status, lines', [('UserError', 2, 1), ('ValueError', 1, 5)])
def test_a_program_that_leaves_a_user_error_uncaught_ends_with_one_line(
    error: str, status: int, lines: int
) -> None:
    program = (
        'from moevement_ext.errors import UserError\n'
        'from moevement_ext.system import user_errors\n'
        'user_errors.explain_uncaught()\n'
        'user_errors.explain_uncaught()\n'
        f'raise {error}("--flag must be 1")\n'
    )
    ended = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, check=False
    )
    assert ended.returncode == status
    assert len(ended.stderr.splitlines()) <= lines and '--flag must be 1' in ended.stderr
