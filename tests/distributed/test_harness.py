# SPDX-License-Identifier: Apache-2.0
"""A test that fails says why: what its jobs printed is in the report."""

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from moevement_ext.membership.mailbox import write_finished
from moevement_ext.membership.rendezvous import launcher_store
from tests.distributed import conftest
from tests.distributed.harness.cluster import Cluster

pytest_plugins = 'pytester'

FAILS = """
import pytest

@pytest.fixture(scope='session')
def text():
    return []

def prints_and_fails(cluster):
    job = cluster()
    job.directory.mkdir()
    job.log(rank=2).write_text('rank 2 has said why')
    (job.directory / 'launcher0.log').write_text('and so has its launcher')
    events = job.directory / 'events'
    events.mkdir()
    (events / 'rank1.jsonl').write_text('{"time": 1.5, "event": "next_tier", "rank": 1}')
    raise AssertionError

@pytest.fixture
def half_made(cluster):
    prints_and_fails(cluster)

def test_fails(cluster):
    prints_and_fails(cluster)

def test_is_not_set_up(half_made):
    pass
"""


def test_failing_test_shows_the_output_of_its_jobs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FAILS)
    result = pytester.inline_run('-p', 'no:cacheprovider', plugins=[conftest])
    failed = [report for report in result.getreports() if getattr(report, 'failed', False)]
    assert [report.when for report in failed] == ['call', 'setup']
    for report in failed:
        (shown,) = (content for name, content in report.sections if name == 'job in run0')
        assert 'rank 2 has said why' in shown and 'and so has its launcher' in shown
        assert 'next_tier' in shown


def main() -> None:
    """A rank of a job: rank 0 finishes, and then rank 1 dies, and so does its replacement."""
    store = launcher_store(timedelta(seconds=60))
    assert store is not None
    if os.environ['RANK'] == '0':
        write_finished(store, 0, 0)
        store.set('over', '')
        return
    store.get('over')
    os.kill(os.getpid(), signal.SIGKILL)


def test_worker_that_dies_after_others_finished_is_not_replaced(tmp_path: Path) -> None:
    """Or the job would not end, and nothing would say that a fault came too late."""
    job = Cluster([], tmp_path, ranks=2, program=__name__)
    with pytest.raises(RuntimeError, match=r'rank 1 died when ranks \[0\] had finished'):
        job.survive()
