# SPDX-License-Identifier: Apache-2.0
"""What long jobs are judged by: a fault left out, a digest or a verification that is not as it
must be is found, and the faults are made one by one then.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.harness import references as places
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import NOTHING, Fault, struck
from tests.distributed.harness.references import References

FIRST, SECOND = Fault('the first', '0:8:step'), Fault('the second', '1:12:p2p,0:12:load')
DIGEST = {'iteration': 16, 'ranks': {'0': {'weight': 'a'}, '1': {'weight': 'b'}}}
NOT_BACK = 'the second: rank 0 has not come back in its attempt 2'
Break = Callable[[list[dict], dict], None]


class Recorded(Cluster):
    """A job of two ranks that only writes what one that was struck would have."""

    def __init__(self, directory: Path, spoil: Break | None = None) -> None:
        super().__init__([], directory, ranks=2)
        self.spoil = spoil

    def survive(self, *, fail_at: str = '', **_: Any) -> dict[int, int]:
        events, digest = self.attempts_of(fail_at), json.loads(json.dumps(DIGEST))
        if self.spoil is not None:
            self.spoil(events, digest)
        (self.directory / 'events').mkdir(parents=True)
        for rank in range(2):
            lines = [json.dumps(event) for event in events if event['rank'] == rank]
            (self.directory / 'events' / f'rank{rank}.jsonl').write_text('\n'.join(lines) + '\n')
        (self.directory / 'digest.json').write_text(json.dumps(digest))
        started = [event['rank'] for event in events if event['event'] == 'worker_started']
        self.attempts += 1
        return {rank: started.count(rank) - 1 for rank in set(started) if started.count(rank) > 1}

    def attempts_of(self, deaths: str) -> list[dict]:
        """Each new process is back, having verified two operators."""
        events = [event(rank, 0, 'worker_started') for rank in range(2)]
        for death in deaths.split(','):
            rank, _, _, attempt = death.split(':')
            events.append(event(int(rank), int(attempt) + 1, 'worker_started'))
            back: dict[str, Any] = {'scope': 'localized', 'replayed': 4, 'iterations': 4}
            back |= {'verified': 2, 'verified_at': 7, 'differing': [], 'seconds': {}}
            events.append(event(int(rank), int(attempt) + 1, 'recovered', **back))
        return events


def event(rank: int, attempt: int, name: str, **fields: Any) -> dict:
    return {'event': name, 'rank': rank, 'pid': 10 * attempt + rank, 'time': 1.0, **fields}


def last_attempt_is_missing(events: list[dict], digest: dict) -> None:
    """A fault that was left out of the job."""
    newest = max(event['pid'] for event in events)
    events[:] = [event for event in events if event['pid'] != newest]


def one_differs(events: list[dict], digest: dict) -> None:
    digest['ranks']['1']['weight'] = 'c'


def nothing_verified(events: list[dict], digest: dict) -> None:
    for found in events:
        if found['event'] == 'recovered' and found['pid'] >= 10:
            found['verified'] = 0


def one_operator_differs(events: list[dict], digest: dict) -> None:
    events[-1]['differing'] = ['layer1.expert0']


def whole_job(events: list[dict], digest: dict) -> None:
    events[-1]['scope'] = 'whole-job'


@pytest.mark.parametrize(
    ('spoil', 'said'),
    [
        (None, []),
        (last_attempt_is_missing, [NOT_BACK, 'restarts: {0: 1, 1: 1}, not {0: 2, 1: 1}']),
        (one_differs, ["1 differ: ['rank 1: weight']"]),
        (nothing_verified, [f'the first: {NOTHING}', f'the second: {NOTHING}']),
        (one_operator_differs, ["rank 0 at 0: ['layer1.expert0'] differ"]),
        (whole_job, ['rank 0 at 0: recovered with the whole job']),
    ],
)
def test_wrong_results_are_found(spoil: Break | None, said: list[str], tmp_path: Path) -> None:
    assert struck(Recorded(tmp_path, spoil), [FIRST, SECOND], DIGEST) == said


# ---- references


def test_references_are_cached_and_one_is_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, kept = tmp_path / 'text.bin', tmp_path / 'kept'
    text.write_bytes(b'text')
    computed: list[int] = []

    def run() -> dict:
        computed.append(1)
        return {'lines': len(computed) if stale else 0}

    stale = False
    for _ in range(2):  # of one session
        first = References(text, kept)
        first.digest(['--lr', '1'], 4, None, run)
        first.digest(['--lr', '1'], 4, None, run)
    assert len(computed) == 2, 'the only one that is kept is computed again by the next session'
    stale = True
    with pytest.raises(AssertionError, match='what does it depend on'):
        References(text, kept).digest(['--lr', '1'], 4, None, run)
    monkeypatch.setattr(places, '_processor', lambda: ['another one'])
    assert References(text, kept).digest(['--lr', '1'], 4, None, run)['lines'] == len(computed)
