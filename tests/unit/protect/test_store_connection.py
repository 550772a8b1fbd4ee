# SPDX-License-Identifier: Apache-2.0
"""A connection to the launcher's store comes back, is not tried all the time, and says little."""

from datetime import timedelta

import pytest
from torch.distributed import DistError

from moevement_ext.protect import persistence
from moevement_ext.protect.persistence import StoreConnection
from tests.unit.protect.distant_store import DistantStore
from tests.unit.replicate.peers import wait_for

pytestmark = pytest.mark.timed

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def server() -> DistantStore:
    return DistantStore()


@pytest.fixture
def connection(server: DistantStore, monkeypatch: pytest.MonkeyPatch) -> StoreConnection:
    monkeypatch.setattr(persistence, '_TIMEOUT', timedelta(seconds=1))  # of each attempt
    return StoreConnection(server.connect(TIMEOUT), 'so nothing is written')


def lose() -> None:
    raise DistError('lost')


def test_successful_step_runs_once_without_a_wait(connection: StoreConnection) -> None:
    before = connection.store
    assert connection.attempt(lambda: connection.store.add('count', 1)) == 0
    assert connection.store.add('count', 0) == 1
    assert connection.store is before


def test_lost_connection_is_replaced(
    server: DistantStore, connection: StoreConnection, caplog: pytest.LogCaptureFixture
) -> None:
    def write() -> None:
        connection.store.add('count', 1)

    server.cut()
    for _ in range(2):
        assert connection.attempt(write, DistError) > 0
    server.repair()
    wait_for(lambda: connection.attempt(write, DistError) == 0)
    assert server.store.add('count', 0) == 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert 'out of reach, so nothing is written' in said[0] and 'reached again' in said[1]


def test_failing_attempts_become_rare(connection: StoreConnection) -> None:
    waits = [connection.attempt(lose) for _ in range(30)]
    assert waits[:4] == [0.4, 0.8, 1.6, 3.2]
    assert waits[7:] == 23 * [30.0]


def test_next_loss_is_logged_again_and_retried_soon(
    connection: StoreConnection, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert [connection.attempt(lose) for _ in range(3)] == [0.4, 0.8, 1.6]
        assert connection.attempt(lambda: None) == 0
    assert caplog.text.count('out of reach') == caplog.text.count('reached again') == 2


def test_other_error_is_raised_and_keeps_the_connection(connection: StoreConnection) -> None:
    def fail() -> None:
        raise ValueError('a mistake')

    before = connection.store
    with pytest.raises(ValueError, match='a mistake'):
        connection.attempt(fail, DistError)
    assert connection.attempt(lambda: None, DistError) == 0
    assert connection.store is before
