# SPDX-License-Identifier: Apache-2.0
"""A job starts with upstream's precompiled helpers, which it cannot compile, on any device."""

import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.datasets import utils

from megatron.moevement.seams import datasets

ROOT = Path(__file__).resolve().parents[5]
START = """
import torch
torch.cuda.is_available = lambda: {gpu}
from megatron.moevement import pretrain_gpt
from megatron.core.datasets.utils import compile_helpers
compile_helpers()
print('started')
"""


@pytest.mark.parametrize('gpu', [pytest.param(False, marks=pytest.mark.thorough), True])
def test_program_compiles_no_helpers_on_any_device(gpu: bool) -> None:
    code = START.format(gpu=gpu)
    started = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
    assert started.returncode == 0, started.stderr
    assert started.stdout.endswith('started\n')


def test_missing_helpers_are_left_to_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    upstreams = utils.compile_helpers
    monkeypatch.setattr(utils, 'compile_helpers', upstreams)  # restored at the end
    monkeypatch.setitem(sys.modules, 'megatron.core.datasets.helpers_cpp', None)
    datasets.use_compiled()
    assert utils.compile_helpers is upstreams
    monkeypatch.undo()
    monkeypatch.setattr(utils, 'compile_helpers', upstreams)
    datasets.use_compiled()
    assert utils.compile_helpers is not upstreams
