# SPDX-License-Identifier: Apache-2.0
import sys
from importlib.machinery import ModuleSpec

import pytest

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import EXIT_USER_ERROR, HostMemoryError, SparseCheckpointError
from moevement_ext.memory.holder_lock import StoreInUseError
from moevement_ext.system.leaving import in_one_line


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
