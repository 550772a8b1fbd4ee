# SPDX-License-Identifier: Apache-2.0
"""Who has come, as a real store keeps it."""

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from moevement_ext.membership import attendance


@settings(deadline=None)
@given(st.integers(1, 130), st.data())
def test_who_has_not_come_is_missing(world_size: int, data: st.DataObject) -> None:
    ranks = range(world_size)
    came = data.draw(st.sets(st.sampled_from(ranks)))
    store = HashStore()
    for rank in came:
        attendance.sign(store, 'here', rank)
    assert attendance.missing(store, 'here', world_size) == sorted(set(ranks) - came)
    assert attendance.missing(store, 'elsewhere', world_size) == list(ranks)
