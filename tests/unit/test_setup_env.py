# SPDX-License-Identifier: Apache-2.0
"""What an interrupted set-up has left is gone on with. The Python only notes what it is to do."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$(dirname "$0")/calls"
[[ "$*" != *"$(cat "$(dirname "$0")/fails")"* ]]
"""
NOTHING = 'what no call has'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With an environment that is half-built."""
    (tmp_path / 'scripts').mkdir()
    shutil.copy(ROOT / 'scripts' / 'setup_env.sh', tmp_path / 'scripts')
    (tmp_path / 'setup.py').touch()
    programs = tmp_path / '.venv' / 'bin'
    programs.mkdir(parents=True)
    (programs / 'python').write_text(PYTHON)
    (programs / 'python').chmod(0o755)
    (programs / 'fails').write_text(NOTHING)
    (tmp_path / '.venv' / '.building').touch()
    for name, files in {'whole': ['METADATA', 'INSTALLER'], 'torn': ['METADATA']}.items():
        info = packages(tmp_path) / f'{name}-1.0.dist-info'
        info.mkdir(parents=True)
        for file in files:
            (info / file).touch()
    (packages(tmp_path) / '~orch').mkdir()
    return tmp_path


def packages(checkout: Path) -> Path:
    return checkout / '.venv' / 'lib' / 'python3.12' / 'site-packages'


def set_up(checkout: Path, *flags: str, **programs_there: str) -> subprocess.CompletedProcess[str]:
    """No other Python makes an environment, either."""
    programs = checkout / 'programs'
    programs.mkdir()
    (programs / 'fails').write_text('-m venv')
    pythons = dict.fromkeys(('python3.12', 'python3.13', 'python3.14', 'python3'), PYTHON)
    for name, text in {**pythons, **programs_there}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return subprocess.run(
        [checkout / 'scripts' / 'setup_env.sh', *flags],
        env={**os.environ, 'PATH': f'{programs}:{os.environ["PATH"]}'},
        capture_output=True,
        text=True,
        check=False,
    )


def test_half_built_environment_is_completed(checkout: Path) -> None:
    done = set_up(checkout)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in packages(checkout).iterdir()] == ['whole-1.0.dist-info']
    assert 'continuing with .venv' in done.stderr and 'removing' not in done.stderr
    calls = (checkout / '.venv' / 'bin' / 'calls').read_text()
    assert 'pip install' in calls
    assert not (checkout / '.venv' / '.building').exists()
    assert (checkout / '.venv' / '.installed').exists()


def test_environment_without_pip_is_rebuilt(checkout: Path) -> None:
    (checkout / '.venv' / 'bin' / 'fails').write_text('pip --version')
    done = set_up(checkout)
    assert 'removing .venv, left half-built without pip' in done.stderr
    assert 'continuing with' not in done.stderr
    assert '-m venv .venv' in (checkout / 'programs' / 'calls').read_text()


def test_torch_of_a_trial_is_installed_first_from_an_index_without_cuda(checkout: Path) -> None:
    done = set_up(checkout, '--cpu')
    assert done.returncode == 0, done.stderr
    calls = (checkout / '.venv' / 'bin' / 'calls').read_text().splitlines()
    first, second = (call for call in calls if 'pip install' in call)
    assert '--index-url https://' in first and first.endswith(' torch>=2.11')
    assert '--index-url' not in second and '--editable' in second
