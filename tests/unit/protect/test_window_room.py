# SPDX-License-Identifier: Apache-2.0
"""Room for windows follows the plans: it comes before they do, and goes after they went."""

from typing import cast

from moevement_ext.errors import HostMemoryError
from moevement_ext.protect.room import WindowRoom
from moevement_ext.replicate.host_memory import HostMemory


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


def room_in(memory: Memory) -> tuple[WindowRoom, list[str]]:
    said: list[str] = []
    return WindowRoom(cast(HostMemory, memory), said.append), said


def test_room_comes_with_a_longer_plan_and_goes_when_only_shorter_ones_are_in_force() -> None:
    memory = Memory(window=2, most=8)
    room, said = room_in(memory)
    room.before(4)
    assert (memory.window, memory.log) == (4, 4)
    room.settle()
    assert memory.window == 4, 'windows of 4 come'
    room.in_force = 4
    room.before(1)
    room.settle()
    assert memory.window == 4, 'windows of 4 are still captured'
    room.in_force = 1
    room.settle()
    assert memory.window == 1 and said == [] and room.limit is None


def test_a_rank_without_room_says_up_to_which_length_it_has() -> None:
    memory = Memory(window=2, most=3)
    room, said = room_in(memory)
    room.before(5)
    assert memory.window == room.limit == 2 and memory.log == 5
    assert said == ['there is no room for windows of 5: others have taken the space']
    room.settle()
    assert memory.window == 2
