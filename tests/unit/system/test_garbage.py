# SPDX-License-Identifier: Apache-2.0
"""Collections in training visit what training has made, and nothing else."""

import gc
import weakref

from moevement_ext.system import garbage


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_collections_skip_what_was_there_and_find_what_came() -> None:
    before, unreachable = Cycle(), weakref.ref(Cycle())
    with garbage.settled():
        assert unreachable() is None
        assert not any(one is before for one in gc.get_objects())
        later = weakref.ref(Cycle())
        gc.collect()
        assert later() is None
    assert any(one is before for one in gc.get_objects())
