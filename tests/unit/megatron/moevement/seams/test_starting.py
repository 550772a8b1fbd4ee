# SPDX-License-Identifier: Apache-2.0
"""A broken installation is explained in one sentence; each case runs in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[5]
CHECK = 'from megatron.moevement.seams import starting; starting.check_installation()'


def _check(*paths: Path) -> subprocess.CompletedProcess:
    code = f'import sys; sys.path[:0] = {[str(path) for path in paths]!r}; {CHECK}'
    return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd='/')


def _install(folder: Path, version: str) -> None:
    """Let a version of megatron-core be found first."""
    metadata = folder / f'megatron_core-{version}.dist-info'
    metadata.mkdir()
    (metadata / 'METADATA').write_text(
        f'Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n'
    )


def test_good_installation_passes() -> None:
    assert _check(ROOT).returncode == 0


def test_foreign_init_file_is_named(tmp_path: Path) -> None:
    package = tmp_path / 'megatron'
    package.mkdir()
    (package / '__init__.py').touch()
    (package / 'moevement').symlink_to(ROOT / 'megatron' / 'moevement')
    found = _check(tmp_path)
    assert found.returncode != 0
    assert str(package / '__init__.py') in found.stderr and 'Remove that file' in found.stderr


@pytest.mark.parametrize('version', ['0.18.1', '0.20.0'])
def test_other_version_of_megatron_core_is_named(tmp_path: Path, version: str) -> None:
    _install(tmp_path, version)
    found = _check(tmp_path, ROOT)
    assert found.returncode != 0
    assert f'megatron-core {version}' in found.stderr and 'pip install' in found.stderr


def test_program_ends_with_one_line(tmp_path: Path) -> None:
    _install(tmp_path, '0.18.1')
    found = subprocess.run(
        [sys.executable, str(ROOT / 'pretrain_gpt.py')],
        capture_output=True,
        text=True,
        env={**os.environ, 'PYTHONPATH': f'{tmp_path}:{ROOT}'},
    )
    assert found.returncode == 2
    [line] = [line for line in found.stderr.splitlines() if 'megatron-core' in line]
    assert line.startswith('pretrain_gpt.py: error: ') and 'Traceback' not in found.stderr
