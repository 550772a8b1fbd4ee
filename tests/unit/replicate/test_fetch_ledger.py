# SPDX-License-Identifier: Apache-2.0
"""Ledger entries that a new process takes over from another rank."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moevement_ext.memory.budget import LEDGER_RECORDS
from moevement_ext.memory.ledger import MAX_SCALARS, Ledger, LedgerEntry
from moevement_ext.replicate.client import PeerLost, PeerRefused, ReplicaClient
from moevement_ext.replicate.protocol import LedgerEntries
from moevement_ext.replicate.replica_server import ReplicaServer
from tests.unit.memory.samples import SECRET, identity_of
from tests.unit.replicate.peers import DEADLINE_S
from tests.unit.replicate.test_answers import Answers
from tests.unit.replicate.test_answers import answering as answering

pytestmark = pytest.mark.timed

LARGEST = 2**63
"""Iteration numbers, for which entries are as long as they get."""


@pytest.fixture
def ledger(server: ReplicaServer, shm: Path) -> Iterator[Ledger]:
    ledger = server._ledger = Ledger(shm / 'ledger', LEDGER_RECORDS, identity_of(1))
    yield ledger
    ledger.close()


def entry(iteration: int, **own: object) -> LedgerEntry:
    norms = [0.1 + place for place in range(MAX_SCALARS)]
    known = LedgerEntry(iteration, norms, [True] * MAX_SCALARS, LARGEST, LARGEST, LARGEST)
    return msgspec.structs.replace(known, consumed_valid=LARGEST, **own)


def test_a_whole_ledger_is_one_bounded_reply(ledger: Ledger, client: ReplicaClient) -> None:
    """Without what only that rank knows, and however much is asked for."""
    first = LARGEST - LEDGER_RECORDS
    for iteration in range(first, LARGEST):
        ledger.append(entry(iteration, loss=0.5))
    expected = [entry(iteration) for iteration in range(first, LARGEST)]
    assert client.fetch_ledger(first - 1, LARGEST - 1) == expected
    assert client.fetch_ledger(0, LARGEST - 1) == expected
    assert client.fetch_ledger(first, first + 1) == expected[1:2]
    assert client.fetch_ledger(0, 9) == []


def test_rank_without_a_ledger_refuses(client: ReplicaClient) -> None:
    with pytest.raises(PeerRefused, match='no ledger is kept here'):
        client.fetch_ledger(0, 9)


@pytest.mark.parametrize('iteration', [-1, 3, 10])
def test_entries_of_other_iterations_are_refused(iteration: int, answering: Answers) -> None:
    client = ReplicaClient(answering(LedgerEntries([entry(iteration)])), SECRET, DEADLINE_S)
    with pytest.raises(PeerLost, match='entries of other iterations'):
        client.fetch_ledger(3, 9)
