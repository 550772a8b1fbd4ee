# SPDX-License-Identifier: Apache-2.0
"""Reports are decoded as sent; parts that they have in common are decoded once."""

import gc

import msgspec

from moevement_ext.membership.report import Report, decode_all, encode
from tests.unit.membership.large_job import RANKS_PER_NODE, LargeJob, replacement

WORLD = 4 * RANKS_PER_NODE


def test_equal_parts_of_reports_are_one_object() -> None:
    layout = LargeJob(WORLD)
    reports = [layout.report(rank, 0, 41) for rank in range(WORLD - 1)] + [replacement(WORLD - 1)]
    found = decode_all([encode(report) for report in reports])
    assert found == reports
    assert [msgspec.msgpack.decode(encode(report), type=Report) for report in reports] == found
    of_first_node = found[:RANKS_PER_NODE]
    assert all(report.windows is found[0].windows for report in of_first_node)
    assert found[0].windows != found[RANKS_PER_NODE].windows


def test_reports_are_not_tracked_by_the_garbage_collector() -> None:
    [found] = decode_all([encode(LargeJob(WORLD).report(0, 0, 41))])
    held = found.windows[0]
    assert not any(map(gc.is_tracked, [found, held, held.window, held.window.name]))
