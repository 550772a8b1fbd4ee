# SPDX-License-Identifier: Apache-2.0
"""What is extrapolated from the figures, and what counts as a request."""

from typing import Any

import pytest
from torch.distributed import TCPStore

from tools.bench import control_plane
from tools.bench.control_plane import Size, fit
from tools.bench.control_plane_members import CountedStore, Tally
from tools.lab.figures import Spread


def size(ranks: int, requests: float) -> Size:
    others: dict[str, Any] = dict.fromkeys(Size.__struct_fields__, 1)
    others['verdict_range_s'] = Spread.of([1.0])
    return Size(**(others | {'ranks': ranks, 'requests': requests}))


def test_growth_is_that_of_what_was_measured() -> None:
    found = fit([size(ranks, 3.0 * ranks**1.5) for ranks in (64, 256, 1024)], 'requests')
    assert found.exponent == pytest.approx(1.5)
    assert found.extrapolated['16384'] == pytest.approx(3.0 * 16384**1.5)


def test_requests_and_bytes_of_a_connection_and_its_clones() -> None:
    tally = Tally()
    store = CountedStore(TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False), tally)
    store.set('key', 'value')
    assert store.clone().get('key') == b'value'
    found = tally.read()
    assert (found.requests, found.nbytes, found.largest) == (3, 3 + 5 + 2 * 3 + 5, 5)


@pytest.mark.parametrize('flags', [['--ranks', '8'], ['--ranks', '256', '64'], ['--rest', '0']])
def test_refused_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        control_plane.parse_arguments(flags)
    assert flags[0] in capsys.readouterr().err
