# SPDX-License-Identifier: Apache-2.0
"""The ranks of a node ask the launcher's store together. On the thread of the node's leader only.

Who asks what another one has asked waits until that is answered, and all who wait then ask at once:
so a node asks seldom when the store is slow, and nobody is told what was true before he asked.
"""

import asyncio
from asyncio import Future, Task
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from moevement_ext.store import wire
from moevement_ext.store.line import Line
from moevement_ext.store.wire import Kind, Request

_TOGETHER = {Kind.ADD, Kind.COMPARE_SET, Kind.GET, Kind.CHECK, Kind.NUM_KEYS, Kind.MULTI_GET}
"""Kinds that, asked twice in a row, give the same answer, or one that follows from it."""
_Group = tuple[Kind, tuple[bytes, ...], tuple[bytes, ...]]
_Asked = tuple[Request, Future[bytes]]


class Questions:
    """Those that are answered at once.

    Args:
        line: to the store.
    """

    def __init__(self, line: Line) -> None:
        self._line = line
        self._next: dict[_Group, list[_Asked]] = {}
        self._tasks: set[Task[None]] = set()

    async def ask(self, request: Request) -> bytes:
        """What the store answers.

        Raises:
            ConnectionError: as `Line.ask`.
        """
        if request.kind not in _TOGETHER:
            return await self._line.ask(request)
        group = request.kind, request.keys, request.values
        answer: Future[bytes] = asyncio.get_running_loop().create_future()
        if group in self._next:
            self._next[group].append((request, answer))
        else:
            self._next[group] = [(request, answer)]
            _start(self._tasks, self._ask_in_turn(group))
        return await answer

    async def _ask_in_turn(self, group: _Group) -> None:
        while asked := self._next[group]:
            self._next[group] = []
            try:
                answers = await self._ask_together([request for request, _ in asked])
            except ConnectionError as error:
                for _, answer in asked:
                    if not answer.done():  # else who asked has left
                        answer.set_exception(error)
                continue
            for (_, answer), found in zip(asked, answers, strict=True):
                if not answer.done():
                    answer.set_result(found)
        del self._next[group]

    async def _ask_together(self, requests: Sequence[Request]) -> list[bytes]:
        first = requests[0]
        if first.kind != Kind.ADD:
            return [await self._line.ask(first)] * len(requests)
        numbers = [request.number for request in requests]
        answer = await self._line.ask(Request(Kind.ADD, first.keys, number=sum(numbers)))
        return [wire.number(one) for one in wire.shares(numbers, wire.number_in(answer))]


class Waits:
    """Those for keys that are still to come: each has a line, for all who wait for the same.

    Args:
        connect: opens a line.
    """

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, Line]]) -> None:
        self._connect = connect
        self._idle: list[Line] = []
        self._waiting: dict[tuple[bytes, ...], Task[None]] = {}
        self._waiters: dict[tuple[bytes, ...], int] = {}

    async def wait(self, keys: tuple[bytes, ...]) -> None:
        """Return when the keys are there; can be cancelled.

        Raises:
            OSError: the connection is lost.
        """
        if keys not in self._waiting:
            self._waiting[keys] = asyncio.create_task(self._wait(keys))
            self._waiters[keys] = 0
        task = self._waiting[keys]
        self._waiters[keys] += 1
        try:
            await asyncio.shield(task)
        finally:
            if self._waiting.get(keys) is task:
                self._waiters[keys] -= 1
                if not self._waiters[keys]:
                    self._forget(keys)
                    task.cancel()

    def close(self) -> None:
        """Cut all lines."""
        for line in self._idle:
            line.close()
        for task in self._waiting.values():
            task.cancel()

    async def _wait(self, keys: tuple[bytes, ...]) -> None:
        line = self._idle.pop() if self._idle else await self._connect()
        try:
            await line.ask(Request(Kind.WAIT, keys))
        except BaseException:  # nobody waits any more: cheaper than to make the store forget it
            line.close()
            raise
        self._idle.append(line)
        self._forget(keys)  # who comes from now on asks anew

    def _forget(self, keys: tuple[bytes, ...]) -> None:
        del self._waiting[keys], self._waiters[keys]


def _start(tasks: set[Task[None]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)  # asyncio itself keeps none alive
    tasks.add(task)
    task.add_done_callback(tasks.discard)
