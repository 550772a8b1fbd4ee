# SPDX-License-Identifier: Apache-2.0
"""The end of a job after its last iteration."""

from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed import DistError

from moevement_ext.job.job import Job
from moevement_ext.launch.statements import tell_finished
from moevement_ext.membership.rendezvous import launcher_store

_STORE_TIMEOUT = timedelta(seconds=10)


def finish(job: Job, remove: bool = True) -> None:
    """End the job on this rank and free its host memory once all ranks have finished. Collective.

    Args:
        job: the job on this rank.
        remove: delete the windows; otherwise a relaunched job can continue from them.
    """
    torch.distributed.barrier()  # no rank frees windows that another may need to recover
    announce(job.rank.number, 0)
    job.close(remove)


def announce(rank: int, code: int) -> None:
    """Report to the launcher that this process is done and will end with exit status `code`."""
    with suppress(DistError):  # the launcher may be gone already
        store = launcher_store(_STORE_TIMEOUT)
        if store is not None:
            tell_finished(store, rank, code)
