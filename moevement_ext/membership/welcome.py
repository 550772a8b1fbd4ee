# SPDX-License-Identifier: Apache-2.0
"""A survivor that waits for a new process tells it all that its set-up needs.

Which attempt of the job it joins, how that is launched, and what is handed over. So the set-up need
not wait until all have met: in a large job that takes seconds.
"""

from collections.abc import Iterator

import msgspec

from moevement_ext.membership import packing
from moevement_ext.membership.arrivals import place_in
from moevement_ext.membership.rendezvous import Rendezvous, present_round
from moevement_ext.membership.report import Report
from moevement_ext.store.peek import peek

_MOST_ASKED = 4


_REPORT = msgspec.msgpack.Decoder(Report)


def waiting_survivor(rendezvous: Rendezvous) -> Report | None:
    """What a survivor has brought to the present round; None if none of some ranks is there yet.

    The `rendezvous` of this process has not joined that round.
    """
    store, rank, world_size = rendezvous.store, rendezvous.rank, rendezvous.world_size
    round = present_round(store)
    if round == 0:
        return None  # the job begins
    for other in _asked(rank, world_size):
        place = place_in(round, other)
        if store.check([place]):  # others may wait for it, which a mere `peek` would wake up
            found = peek(store, place)
            if found is not None:
                report = _REPORT.decode(packing.unpacked(found))
                if report.survivor and report.details:
                    return report
    return None


def _asked(rank: int, world_size: int) -> Iterator[int]:
    """Some other ranks, far from each other: ranks of a node are lost together."""
    step = max(world_size // _MOST_ASKED, 1)
    for away in range(step, world_size, step):
        yield (rank + away) % world_size
