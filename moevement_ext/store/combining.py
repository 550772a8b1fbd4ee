# SPDX-License-Identifier: Apache-2.0
"""Combines the requests of a node's ranks to the launcher's store. On the thread of a proxy only.

While a request is in flight, equal requests (or all additions to the same counter) wait, and then
go out as one. So a node sends few requests when the store is slow, and no client gets an answer
that is older than its request.
"""

import asyncio
from asyncio import Future, Task
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple

from moevement_ext.store import wire
from moevement_ext.store.line import Line
from moevement_ext.store.wire import Kind, Request

# Kinds of which several requests of a group can be answered from the answer to one.
_TOGETHER = {Kind.ADD, Kind.COMPARE_SET, Kind.GET, Kind.CHECK, Kind.NUM_KEYS, Kind.MULTI_GET}
_Group = tuple[Kind, tuple[bytes, ...], tuple[bytes, ...]]
_Asked = tuple[Request, Future[bytes]]


class Questions:
    """Requests that the store answers at once; equal ones are sent at least `pause_s` apart."""

    def __init__(self, line: Line, pause_s: float) -> None:
        self._line = line
        self._pause_s = pause_s
        self._loop = asyncio.get_running_loop()
        # Requests for the next transmission; also has every group with a request in flight, perhaps
        # empty.
        self._next: dict[_Group, list[_Asked]] = {}

    def ask(self, request: Request) -> Future[bytes]:
        """Future of the store's answer; fails as `Line.ask` does."""
        if request.kind not in _TOGETHER:
            return self._line.ask(request)
        group = request.kind, request.keys, request.values
        answer: Future[bytes] = self._loop.create_future()
        if group not in self._next:
            self._next[group] = []
            # Together with all equal requests of this turn of the loop.
            self._loop.call_soon(self._ask_next, group)
        self._next[group].append((request, answer))
        return answer

    def _ask_next(self, group: _Group) -> None:
        asked, self._next[group] = self._next[group], []
        if asked:
            together = _together([request for request, _ in asked])
            self._line.ask(together).add_done_callback(partial(self._answer, group, asked))
        else:
            del self._next[group]

    def _answer(self, group: _Group, asked: Sequence[_Asked], found: Future[bytes]) -> None:
        error = found.exception()
        answers = [] if error else _apart([request for request, _ in asked], found.result())
        for number, (_, answer) in enumerate(asked):
            if answer.done():  # the client has left
                continue
            if error:
                answer.set_exception(error)
            else:
                answer.set_result(answers[number])
        if self._pause_s:
            self._loop.call_later(self._pause_s, self._ask_next, group)
        else:
            self._ask_next(group)


class _Wait(NamedTuple):
    task: Task[None]
    waiters: dict[Future[bytes], None]
    """In order of arrival; they are answered in this order."""


class Waits:
    """Waits for keys that are not set yet; clients that wait for the same keys share a connection.

    `connect` opens a `Line`. At most `most` different sets of keys are waited for at a time.
    """

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, Line]], most: int) -> None:
        self._connect = connect
        self._most = most
        self._idle: list[Line] = []
        self._waiting: dict[tuple[bytes, ...], _Wait] = {}

    def wait(self, keys: tuple[bytes, ...]) -> Future[bytes]:
        """Future of the store's answer once the keys are set; clients that stop waiting cancel it.

        It fails with `ConnectionError` if the connection is lost. Raises `ValueError` if clients
        wait for more different keys than ranks ever do.
        """
        if keys not in self._waiting:
            if len(self._waiting) >= self._most:
                raise ValueError(f'{len(self._waiting)} different keys are waited for')
            waiters: dict[Future[bytes], None] = {}
            task = asyncio.create_task(self._wait(keys, waiters))
            self._waiting[keys] = _Wait(task, waiters)
        waiter: Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[keys].waiters[waiter] = None
        waiter.add_done_callback(partial(self._leave, keys))
        return waiter

    def close(self) -> None:
        for line in self._idle:
            line.close()
        for wait in self._waiting.values():
            wait.task.cancel()

    async def _wait(self, keys: tuple[bytes, ...], waiters: dict[Future[bytes], None]) -> None:
        line: Line | None = None
        try:
            line = self._idle.pop() if self._idle else await self._connect()
            await line.ask(Request(Kind.WAIT, keys))
        except (OSError, asyncio.CancelledError) as error:
            # Also after all clients have left, as a cancellation in the store costs more.
            if line is not None:
                line.close()
            self._end(keys, waiters, ConnectionError(f'the wait has ended: {error!r}'))
        else:
            self._idle.append(line)
            self._end(keys, waiters, None)

    def _end(
        self, keys: tuple[bytes, ...], waiters: dict[Future[bytes], None], error: Exception | None
    ) -> None:
        """Answer all waiting clients; later clients start a new wait."""
        found = self._waiting.get(keys)
        if found is not None and found.waiters is waiters:
            del self._waiting[keys]
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(wire.ARRIVED)
            else:
                waiter.set_exception(error)

    def _leave(self, keys: tuple[bytes, ...], waiter: Future[bytes]) -> None:
        found = self._waiting.get(keys)
        if found is not None and waiter in found.waiters:
            del found.waiters[waiter]
            if not found.waiters:
                del self._waiting[keys]
                found.task.cancel()


def _together(requests: Sequence[Request]) -> Request:
    """One request that replaces several requests of a group."""
    first = requests[0]
    if first.kind != Kind.ADD:
        return first
    return Request(Kind.ADD, first.keys, number=sum(request.number for request in requests))


def _apart(requests: Sequence[Request], answer: bytes) -> list[bytes]:
    """Split the answer to a combined request into the answers to its requests."""
    if requests[0].kind != Kind.ADD:
        return [answer] * len(requests)
    numbers = [request.number for request in requests]
    return [wire.number(one) for one in shares(numbers, wire.number_in(answer))]


def shares(numbers: Sequence[int], result: int) -> list[int]:
    """The answer to each client, as if the clients had added `numbers` one after the other.

    `result` is the counter after all additions.
    """
    found = []
    for value in reversed(numbers):
        found.append(result)
        result -= value
    return found[::-1]
