# SPDX-License-Identifier: Apache-2.0
"""Whole jobs on one GPU; `--cpu` tries them without one."""

import importlib.util

import pytest
import torch

from tests.gpu.jobs import copies, environment, four_rank, nccl, one_rank
from tests.gpu.jobs.conftest import Passes
from tests.gpu.jobs.findings import Settings
from tools.lab import precisions

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(570)]


def test_environment(settings: Settings, passes: Passes) -> None:
    """Packages, versions and memory meet the requirements."""
    passes(environment.run(settings))


def test_copies(settings: Settings, passes: Passes) -> None:
    """Captures are as fast as the machine and delay nothing else."""
    passes(copies.run(settings))


def test_nccl(settings: Settings, passes: Passes) -> None:
    """Survivors of a killed rank are unblocked and reconnected."""
    passes(nccl.run(settings))


def test_one_rank(settings: Settings, passes: Passes) -> None:
    """A model of 0.3 G parameters recovers bit for bit."""
    passes(one_rank.run(settings))


def test_recorded(settings: Settings, passes: Passes) -> None:
    """The same, with iterations recorded as a CUDA graph, recovers bit for bit."""
    needed = 'set_override_stale_capture_stream'
    if not (settings.gpu and hasattr(torch.autograd.graph, needed)):
        pytest.skip(f'needs a GPU and {needed} of torch, without which it may refuse to record')
    passes(one_rank.run_recorded(settings))


def test_transformer_engine(settings: Settings, passes: Passes) -> None:
    """The same model on Transformer Engine, with grouped experts."""
    require_transformer_engine(settings)
    passes(one_rank.run_transformer_engine(settings))


@pytest.mark.parametrize('name', [name for name in precisions.FLAGS if name != 'bf16'])
def test_precision(settings: Settings, passes: Passes, name: str) -> None:
    """A column of the paper's Table 7 recovers bit for bit; a dry run has stand-ins."""
    if settings.gpu:
        require_transformer_engine(settings)
    passes(one_rank.run_precision(name, settings))


def test_four_rank(settings: Settings, passes: Passes) -> None:
    """A lost rank of PP 2 x EP 2 recovers alone, bit for bit."""
    passes(four_rank.run(settings))


def require_transformer_engine(settings: Settings) -> None:
    if not settings.gpu or importlib.util.find_spec('transformer_engine') is None:
        pytest.skip('needs a GPU and Transformer Engine')
