# SPDX-License-Identifier: Apache-2.0
"""Installations, settings without a GPU, and what upstream sets up if asked, at the start."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.training import argument_utils, ft_integration, global_vars

from megatron.moevement.checking import parser
from megatron.moevement.offline import run_flags
from megatron.moevement.seams import cpu_device, warming, without_gpu

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


def test_export_uses_the_same_cpu_settings() -> None:
    defaults, without = run_flags.without_gpu_settings(parser()), without_gpu.FLAGS.split()
    changing = {
        action.dest for action in parser()._actions if {*action.option_strings} & {*without}
    }
    assert defaults.keys() == changing and len(changing) == 9
    assert defaults['distributed_backend'] == 'gloo' and not defaults['bias_swiglu_fusion']


@pytest.mark.parametrize('users', [None, '0'])
def test_environment_value_of_the_user_takes_precedence(
    users: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in without_gpu.VARIABLES:
        monkeypatch.delenv(name, raising=False)
        if users is not None:
            monkeypatch.setenv(name, users)
    for name in ('_redirect_devices', '_redirect_cuda_module', '_redirect_streams'):
        monkeypatch.setattr(cpu_device, name, lambda: None)
    monkeypatch.setattr(cpu_device.quiet, 'on_a_cpu', lambda: None)
    monkeypatch.setattr(cpu_device, 'hide_transformer_engine', lambda: None)
    cpu_device.install.__wrapped__()
    for name, value in without_gpu.VARIABLES.items():
        assert os.environ[name] == (value if users is None else users)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    factory = argument_utils.ArgumentGroupFactory
    monkeypatch.setattr(factory, '_get_field_docstrings', factory._get_field_docstrings)
    monkeypatch.setattr(ft_integration, 'setup', ft_integration.setup)
    monkeypatch.setattr(warming, '_installed', False)
    monkeypatch.setattr(warming, '_known', {})
    return monkeypatch


@pytest.mark.parametrize('asked', [False, True])
def test_fault_tolerance_setup_runs_only_if_enabled(
    asked: bool, installed: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    installed.setattr(ft_integration, 'setup', lambda: called.append('setup'))
    installed.setattr(global_vars, '_GLOBAL_ARGS', argparse.Namespace(enable_ft_package=asked))
    warming.install()
    ft_integration.setup()
    assert called == (['setup'] if asked else [])
