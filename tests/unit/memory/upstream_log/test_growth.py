# SPDX-License-Identifier: Apache-2.0
"""A log that is made larger in training loses nothing, wherever in its ring it stands."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moevement_ext.errors import HostMemoryError
from moevement_ext.memory.upstream_log import log as log_module
from moevement_ext.memory.upstream_log.log import UpstreamLog
from tests.unit.memory.samples import tmpfs_directory
from tests.unit.memory.upstream_log.logs import DOWN, REGION, Reports, opened, region, value

REGIONS = 4


@pytest.fixture
def shm() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path


def fill(log: UpstreamLog, iterations: range) -> None:
    for iteration in iterations:
        log.append(iteration, DOWN, region(iteration))


@pytest.mark.parametrize('before', [0, 1, 3, 4], ids=lambda n: f'{n} dropped')
def test_what_is_logged_stays_and_more_fits(before: int, shm: Path) -> None:
    """With some dropped before, the newest lie in front of the oldest."""
    reports = Reports()
    with opened(shm / 'log', reports, REGIONS) as log:
        fill(log, range(REGIONS))
        log.drop_until(before - 1)
        fill(log, range(REGIONS, REGIONS + before))
        log.grow(3 * REGIONS * REGION)
        held = range(before, REGIONS + before)
        assert [value(log, iteration, DOWN, 0) for iteration in held] == list(held)
        # Until the ring has come around it is as large as before.
        log.drop_until(REGIONS + before - 2)
        more = range(REGIONS + before, REGIONS + before + 2 * REGIONS)
        fill(log, more)
        found = [value(log, iteration, DOWN, 0) for iteration in range(more[0] - 1, more.stop)]
        assert found == list(range(more[0] - 1, more.stop))
        assert reports.count() == 0, 'nothing was forgotten'


def test_a_copy_under_way_arrives(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was begun with the map of before."""
    reports = Reports()
    with opened(shm / 'log', reports, REGIONS) as log:
        begun = log._begin_copy(region(7), slice(0, REGION))
        log.grow(2 * REGIONS * REGION)
        begun()
        assert torch.equal(torch.from_numpy(log.array[:REGION]), region(7).view(torch.uint8))


def test_a_log_never_shrinks(shm: Path) -> None:
    with opened(shm / 'log', Reports(), REGIONS) as log:
        log.grow(REGION)
        assert log.array.size == REGIONS * REGION == (shm / 'log').stat().st_size


def test_where_there_is_no_room_it_stays_as_it_is(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, nbytes: int) -> None:
        raise HostMemoryError('no room')

    with opened(shm / 'log', Reports(), REGIONS) as log:
        fill(log, range(REGIONS))
        monkeypatch.setattr(log_module, 'map_anew', full)
        with pytest.raises(HostMemoryError, match='no room'):
            log.grow(2 * REGIONS * REGION)
        assert [value(log, iteration, DOWN, 0) for iteration in range(REGIONS)] == [0, 1, 2, 3]
        log.drop_until(0)
        fill(log, range(REGIONS, REGIONS + 1))
        assert value(log, REGIONS, DOWN, 0) == REGIONS
