# SPDX-License-Identifier: Apache-2.0
"""Collections during training visit only objects created in training."""

import gc
import weakref

from moevement_ext.job.modes import settled


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_collections_skip_older_objects_and_find_new_ones() -> None:
    before, unreachable = Cycle(), weakref.ref(Cycle())
    with settled():
        assert unreachable() is None
        assert not any(one is before for one in gc.get_objects())
        later = weakref.ref(Cycle())
        gc.collect()
        assert later() is None
    assert any(one is before for one in gc.get_objects())
