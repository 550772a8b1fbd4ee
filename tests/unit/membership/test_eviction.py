# SPDX-License-Identifier: Apache-2.0
"""Eviction requests to the launcher of a hung rank."""

from torch.distributed import TCPStore

from moevement_ext.membership.mailbox import evict, evictions, take_eviction


def test_each_eviction_is_counted_and_taken_once() -> None:
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    assert (evictions(store), take_eviction(store, 1)) == (0, None)
    evict(store, 1, 100)
    evict(store, 1, 101)  # its replacement hangs, too
    assert evictions(store) == 2
    assert (take_eviction(store, 0), take_eviction(store, 1)) == (None, 101)
    assert (evictions(store), take_eviction(store, 1)) == (2, None)
