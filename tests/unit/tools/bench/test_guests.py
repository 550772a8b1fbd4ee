# SPDX-License-Identifier: Apache-2.0
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from tests.unit.tools.samples import HARDWARE
from tools.bench.guests import GUESTS, ROUTES, GuestsBench, lived
from tools.lab.run_log import Iteration, RunLog

KILLED_AT = [11.5, 22.5]


def logged(with_guest_s: float) -> Iterator[Iteration]:
    """One second an iteration until the node is lost; each recovery takes two more."""
    time = 0.0
    for number in range(1, 31):
        time += {11: 3.5, 20: 2.0 + with_guest_s}.get(number, 1.0 if number < 20 else with_guest_s)
        yield Iteration(time, number, 1000.0, 5.0)


def test_last_lines_compare_with_the_same_job_before() -> None:
    found = {}
    for way, with_guest_s in ((ROUTES, 1.25), (GUESTS, 2.0)):
        log = RunLog([list(logged(with_guest_s))], [])
        found[way] = lived(log, KILLED_AT, [])
        assert (found[way].fault_free_s, found[way].guest_s) == (1.0, with_guest_s)
        assert found[way].spare_seconds == 2.0
        assert found[way].seconds == log.iterations[19].time - KILLED_AT[1]
    bench = GuestsBench(Namespace(device=0.3), Path(), Path())
    notes = bench.summary(HARDWARE, [found]).notes
    assert notes[1:] == ['routes: iteration=1.25 guests=2.00', 'guests: seconds=1.12']
