# SPDX-License-Identifier: Apache-2.0
"""A fault that comes too late ends its test."""

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from moevement_ext.membership.mailbox import write_finished
from moevement_ext.membership.rendezvous import launcher_store
from tests.distributed.harness.cluster import Cluster


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
