# SPDX-License-Identifier: Apache-2.0
"""Fixtures of jobs whose processes are threads (`threaded_job`)."""

from collections.abc import Iterator

import pytest

from moevement_ext.protect.persistence import WindowTracker
from tests.unit.recover.threaded_job import Expected, install, spy, train


@pytest.fixture(scope='module')
def threads_are_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        yield


@pytest.fixture(scope='module')
def fault_free(request: pytest.FixtureRequest, threads_are_processes: None) -> Expected:
    """States of a job that trains as long as the module's `ITERATIONS` say."""
    return train(request.module.ITERATIONS).states


@pytest.fixture
def withdrawn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks that take back what they said of windows that are not persisted."""
    owners: list[int] = []

    def note(tracker: WindowTracker) -> None:
        owners.append(tracker._persistence._hello.rank)

    spy(monkeypatch, WindowTracker, 'withdraw_unpersisted', note)
    return owners
