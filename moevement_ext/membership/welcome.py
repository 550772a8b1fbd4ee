# SPDX-License-Identifier: Apache-2.0
"""Lets a new process read a waiting survivor's report during its set-up.

The report names the attempt of the job and its launch settings, and has the handed-over state. So
the set-up need not wait for the rendezvous of all ranks, which takes seconds in a large job.
"""

from collections.abc import Iterator

import msgspec

from moevement_ext.membership import packing
from moevement_ext.membership.arrivals import place_in
from moevement_ext.membership.launch import own_launch
from moevement_ext.membership.rendezvous import Rendezvous, present_round
from moevement_ext.membership.report import Report
from moevement_ext.store.peek import peek

_MOST_ASKED = 4


_REPORT = msgspec.msgpack.Decoder(Report)


def waiting_survivor(rendezvous: Rendezvous) -> Report | None:
    """A survivor's report in the present round; None if no sampled survivor has joined yet.

    The `rendezvous` of this process has not joined that round.
    """
    store, rank, world_size = rendezvous.store, rendezvous.rank, rendezvous.world_size
    round = present_round(store)
    if round == 0:
        return None  # the job begins
    for other in _asked(rank, world_size):
        place = place_in(round, other)
        if store.check([place]):  # `peek` would wake up ranks that wait for the key
            found = peek(store, place)
            if found is not None:
                report = _REPORT.decode(packing.unpacked(found))
                # A store outside may keep a report of a launch that is gone.
                if report.survivor and report.details and report.launch == own_launch():
                    return report
    return None


def _asked(rank: int, world_size: int) -> Iterator[int]:
    """A few other ranks, far apart, as ranks of a node are lost together."""
    step = max(world_size // _MOST_ASKED, 1)
    for away in range(step, world_size, step):
        yield (rank + away) % world_size
