# SPDX-License-Identifier: Apache-2.0
"""The end of a job that has trained to its end."""

from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import DistError

from moevement_ext.job.job import Job
from moevement_ext.local_cluster.statements import tell_finished
from moevement_ext.membership.rendezvous import launcher_store

_STORE_TIMEOUT = timedelta(seconds=10)


def finish(job: Job) -> None:
    """Training is over on this rank: give the host memory back when it is so on all. Collective."""
    torch.distributed.barrier()  # nobody gives up what another may still need to recover
    announce(job.rank.number, 0)
    job.close()


def announce(rank: int, code: int) -> None:
    """Let the launcher know that this process is done and will end with exit status `code`."""
    with suppress(DistError):  # a launcher that is gone already does not want to know
        store = launcher_store(_STORE_TIMEOUT)
        if store is not None:
            tell_finished(store, rank, code)
