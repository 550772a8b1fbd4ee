# SPDX-License-Identifier: Apache-2.0
"""Ledger entries of a recovery that is not judged yet: the evidence stays for the next one."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from moevement_ext.job.whole_job_mode import WholeJobMode
from moevement_ext.memory.ledger import Ledger, LedgerEntry
from moevement_ext.recover import whole_job
from tests.unit.memory.samples import identity_of, tmpfs_directory

KNOWN = LedgerEntry(5, [1.5], [], 2, 40, loss=3.25)
OTHER = msgspec.structs.replace(KNOWN, grad_norms=[1.75], loss=3.5)
NEXT = msgspec.structs.replace(OTHER, iteration=6)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with tmpfs_directory() as shm:
        ledger = Ledger(shm / 'ledger', 8, identity_of(0))
        ledger.append(KNOWN)
        yield ledger
        ledger.close()


def mode_of(ledger: Ledger, **parts: object) -> Any:
    mode = object.__new__(WholeJobMode)
    memory = SimpleNamespace(ledger=ledger)
    vars(mode).update(protection=SimpleNamespace(unjudged=True, memory=memory), **parts)
    return mode


def test_unjudged_entry_replaces_no_trusted_one(ledger: Ledger) -> None:
    """A replay that is cut off leaves the evidence for the next recovery."""
    mode = mode_of(ledger)
    for entry in (OTHER, NEXT):
        mode._keep(entry)
    assert ledger.get(5) == KNOWN
    assert ledger.get(6) == msgspec.structs.replace(NEXT, judges=False)


def test_trusted_entry_replaces_any(ledger: Ledger) -> None:
    mode = mode_of(ledger)
    mode.protection.unjudged = False
    mode._keep(OTHER)
    assert ledger.get(5) == OTHER


class Refused(Exception):
    pass


def test_refused_recovery_leaves_what_it_was_judged_by(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery from the next tier is judged by it, too."""

    def refuse(*given: object) -> NoReturn:
        raise Refused(ledger.get(5), ledger.get(6))

    monkeypatch.setattr(whole_job, 'refuse', refuse)
    recorded = [KNOWN, msgspec.structs.replace(KNOWN, iteration=6)]
    ledger.append(OTHER)
    rank = SimpleNamespace(exchange=lambda key, own: [own], config=SimpleNamespace(verify='stop'))
    restart = SimpleNamespace(recorded=recorded, predecessor=None)
    restart.conversion = SimpleNamespace(window=None)
    verification = SimpleNamespace(forbids=lambda verify: True)
    mode = mode_of(ledger, rank=rank, _restart=restart, _verification=verification)
    with pytest.raises(Refused) as refused:
        mode._judge('it differs')
    assert [*refused.value.args] == recorded
