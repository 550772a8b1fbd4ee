# SPDX-License-Identifier: Apache-2.0
"""The end of a job that has trained to its end."""

from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import DistError

from moevement_ext.job.job import Job
from moevement_ext.launch.statements import tell_finished
from moevement_ext.membership.rendezvous import launcher_store

_STORE_TIMEOUT = timedelta(seconds=10)


def finish(job: Job, remove: bool = True) -> None:
    """Training is over on this rank: give the host memory back when it is so on all. Collective.

    Args:
        job: of this rank.
        remove: windows are deleted; else the job can go on from them when it is launched again.
    """
    torch.distributed.barrier()  # nobody gives up what another may still need to recover
    announce(job.rank.number, 0)
    job.close(remove)


def announce(rank: int, code: int) -> None:
    """Let the launcher know that this process is done and will end with exit status `code`."""
    with suppress(DistError):  # a launcher that is gone already does not want to know
        store = launcher_store(_STORE_TIMEOUT)
        if store is not None:
            tell_finished(store, rank, code)
