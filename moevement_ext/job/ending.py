# SPDX-License-Identifier: Apache-2.0
"""Announces the planned end of a process to its launcher."""

from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError

from moevement_ext.launch.statements import tell_finished
from moevement_ext.membership.rendezvous import launcher_store

_STORE_TIMEOUT = timedelta(seconds=10)


def announce(rank: int, code: int) -> None:
    """Report to the launcher that this process is done and will end with exit status `code`."""
    with suppress(DistError):  # the launcher may be gone already
        store = launcher_store(_STORE_TIMEOUT)
        if store is not None:
            tell_finished(store, rank, code)
