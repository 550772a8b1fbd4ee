# SPDX-License-Identifier: Apache-2.0
"""Room for windows follows the plans: it comes before they do, and goes after they went."""

import threading
from typing import cast

from moevement_ext.errors import HostMemoryError
from moevement_ext.replicate.host_memory import HostMemory, WindowRoom


class Memory:
    """Host memory in which windows of up to `most` slots fit."""

    def __init__(self, window: int, most: int) -> None:
        self.window = window
        self.most = most
        self.log = 0

    def make_room_for(self, window: int) -> None:
        if window > self.most:
            raise HostMemoryError('others have taken the space')
        self.window = window

    def make_room_in_log(self, window: int) -> None:
        self.log = max(self.log, window)

    def give_back_log(self, window: int) -> None:
        self.log = min(self.log, window)


def room_in(memory: Memory) -> tuple[WindowRoom, list[str]]:
    said: list[str] = []
    return WindowRoom(cast(HostMemory, memory), said.append), said


def test_room_grows_before_a_longer_plan_and_shrinks_after_it() -> None:
    memory = Memory(window=2, most=8)
    room, said = room_in(memory)
    room.before(4)
    assert (memory.window, memory.log) == (4, 4)
    room.settle(0)
    assert memory.window == 4, 'windows of 4 come'
    room.begins(2, 4)
    room.before(1)
    room.settle(2)
    assert memory.window == 4, 'windows of 4 are still captured'
    room.begins(6, 1)
    room.settle(2)
    assert memory.window == 1 and said == [] and room.limit is None


def test_longer_plan_that_comes_while_room_shrinks_gets_its_room() -> None:
    memory = Memory(window=3, most=8)
    room, _ = room_in(memory)
    room.before(1)
    room.begins(0, 1)
    shrink, shrinking = memory.make_room_for, threading.Event()

    def slowly(window: int) -> None:
        if window == 1:
            shrinking.set()
            planning.join(0.2)
        shrink(window)

    planning = threading.Thread(target=lambda: shrinking.wait(60) and room.before(3))
    memory.make_room_for = slowly  # type: ignore[method-assign]
    planning.start()
    room.settle(0)
    planning.join()
    assert memory.window == 3


def test_rank_without_room_reports_its_longest_window() -> None:
    memory = Memory(window=2, most=3)
    room, said = room_in(memory)
    room.before(5)
    assert memory.window == room.limit == 2 and memory.log == 5
    assert said == ['there is no room for windows of 5: others have taken the space']
    room.settle(0)
    assert memory.window == 2


def test_the_log_is_shorter_once_a_short_window_is_persisted() -> None:
    """What comes after a long one is kept until that."""
    memory = Memory(window=4, most=8)
    room, _ = room_in(memory)
    room.before(4)
    room.begins(8, 4)
    room.before(1)
    room.begins(12, 1)
    room.settle(8)
    assert (memory.window, memory.log) == (1, 4)
    room.settle(12)
    assert memory.log == 1


def test_log_has_room_for_a_recovery_until_its_captures_are_persisted() -> None:
    memory = Memory(window=2, most=8)
    room, _ = room_in(memory)
    room.before(2)
    room.for_recovery(6, 10)
    assert memory.log == 5
    room.settle(6)
    assert memory.log == 5, 'such as one that comes late'
    room.settle(8)
    assert memory.log == 2
