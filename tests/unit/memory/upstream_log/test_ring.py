# SPDX-License-Identifier: Apache-2.0
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.memory.upstream_log.record import region_bytes
from moevement_ext.memory.upstream_log.ring import Ring
from moevement_ext.memory.window.slot import ALIGNMENT

CAPACITY = 12 * ALIGNMENT + 7


def test_regions_are_aligned_and_never_empty() -> None:
    assert [region_bytes(n) for n in (0, 1, 64, 65)] == [64, 64, 64, 128]


def test_ring_shrinks_once_its_tail_is_free() -> None:
    ring = Ring(8 * ALIGNMENT)
    for _ in range(5):
        ring.allocate(ALIGNMENT)
    ring.limit = 4 * ALIGNMENT
    assert ring.allocate(1) == 320, 'before the new end all is taken'
    assert not ring.shrink() and ring.fits(2 * ALIGNMENT)
    ring.free_oldest()
    assert ring.allocate(1) == 0, 'not at 384'
    for _ in range(5):
        assert not ring.shrink()
        ring.free_oldest()
    assert ring.shrink() and ring.capacity == 4 * ALIGNMENT
    assert not ring.shrink(), 'it has'
    assert [ring.allocate(ALIGNMENT) for _ in range(4)] == [64, 128, 192, None]
    for _ in range(2):
        ring.free_newest()
    ring.limit = 2 * ALIGNMENT
    assert ring.shrink(), 'the newest region ends there'


steps = st.lists(
    st.one_of(st.integers(0, CAPACITY + ALIGNMENT), st.sampled_from(['oldest', 'newest', 'less'])),
    max_size=60,
)


@given(steps=steps)
def test_live_regions_never_overlap(steps: list[int | str]) -> None:
    ring = Ring(CAPACITY)
    live: deque[range] = deque()
    for step in steps:
        if step == 'less':
            ring.limit = max(ring.limit - ALIGNMENT, ALIGNMENT)
        elif isinstance(step, int):
            fits = ring.fits(step)
            start = ring.allocate(step)
            assert fits == (start is not None)
            if start is None:
                assert live or region_bytes(step) > ring.capacity, 'an empty ring is all there is'
                continue
            new = range(start, start + max(step, 1))
            assert start % ALIGNMENT == 0 and 0 <= start and new.stop <= ring.capacity
            assert all(new.stop <= old.start or old.stop <= new.start for old in live)
            live.append(new)
        elif live and step == 'oldest':
            ring.free_oldest()
            live.popleft()
        elif live:
            ring.free_newest()
            live.pop()
        if ring.shrink():
            assert all(old.stop <= ring.capacity for old in live)
