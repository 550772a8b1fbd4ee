# SPDX-License-Identifier: Apache-2.0
"""What users may import: a name goes or comes only by a change of this file."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.moevement.seams import cpu_device

ROOT = Path(__file__).resolve().parents[2]
SURFACES = {
    'moevement_ext': [
        'EXIT_OTHER_BITS',
        'EXIT_STUCK',
        'EXIT_USER_ERROR',
        'EXIT_WHOLE_JOB',
        'Committed',
        'ConfigurationError',
        'Direction',
        'HostMemoryError',
        'Job',
        'LedgerEntry',
        'ModuleOperators',
        'OperatorSlices',
        'Place',
        'PlainLoop',
        'SparseCheckpointConfig',
        'SparseCheckpointError',
        'TensorSlice',
        'TorchTrainer',
        'Trainer',
        'UserError',
        '__version__',
    ],
    'megatron.moevement': ['SparseCheckpointConfig', 'TrainingPlan', 'attach'],
}


@pytest.mark.parametrize('package', SURFACES)
def test_public_names_are_these_and_can_be_imported(package: str) -> None:
    cpu_device.install()
    module = importlib.import_module(package)
    assert module.__all__ == SURFACES[package]
    assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match='nothing_of_this_name'):
        _ = module.nothing_of_this_name


@pytest.mark.parametrize('package', SURFACES)
def test_importing_the_package_alone_imports_nothing_large(package: str) -> None:
    """A wrong installation must be explained before torch or upstream are imported."""
    code = f'import sys, {package}; print(*sys.modules)'
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not {'torch', 'numpy', 'megatron.core'} & set(done.stdout.split())


def test_exit_statuses_are_those_that_scripts_rely_on() -> None:
    engine = importlib.import_module('moevement_ext')
    assert (engine.EXIT_USER_ERROR, engine.EXIT_OTHER_BITS) == (2, 77)
    assert (engine.EXIT_WHOLE_JOB, engine.EXIT_STUCK) == (75, 76)
