# SPDX-License-Identifier: Apache-2.0
"""Announces the planned end of a process to its launcher."""

from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError

from moevement_ext.launch.statements import tell_finished
from moevement_ext.membership.rendezvous import launcher_store
from moevement_ext.recover.relayout import surplus

_STORE_TIMEOUT = timedelta(seconds=10)


def announce(rank: int, code: int, freed: bool = False) -> None:
    """Report to the launcher that this process is done and will end with exit status `code`.

    Rank 0 also reports it to the surplus ranks, and whether the windows of the run are freed.
    """
    if rank == 0:
        surplus.dismiss(code, freed)
    with suppress(DistError):  # the launcher may be gone already
        store = launcher_store(_STORE_TIMEOUT)
        if store is not None:
            tell_finished(store, rank, code)
