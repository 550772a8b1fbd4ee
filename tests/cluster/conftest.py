# SPDX-License-Identifier: Apache-2.0
"""A Slurm cluster, and the small jobs of the distributed tests that run on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, running
from tests.distributed.conftest import (
    backend,
    cluster,
    pytest_runtest_makereport,
    reference,
    references,
    text,
)

__all__ = [
    'backend',
    'cluster',
    'pytest_runtest_makereport',
    'reference',
    'references',
    'slurm',
    'text',
]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """Five idle nodes."""
    with running(tmp_path / 'slurm') as started:
        yield started
