# SPDX-License-Identifier: Apache-2.0
"""Combined waits of a proxy against a real store, on the test's own event loop."""

import asyncio
from asyncio import Future
from functools import partial

import pytest

from moevement_ext.store.combining import Waits
from moevement_ext.store.line import Line
from tests.unit.store.processes import WAIT_S, Server

pytestmark = pytest.mark.timed

KEYS = (b'/barrier',)
"""With the prefix of torch's clients."""


def test_waits_are_woken_in_order_of_arrival(server: Server) -> None:
    """Hence ranks of a node that arrive one after another continue one after another."""
    told: list[int] = []

    async def wait_and_open() -> None:
        waits = Waits(partial(Line.open, '127.0.0.1', server.port, lambda: None), 8)
        waiters: list[Future[bytes]] = []
        for number in range(8):
            waiters.append(waits.wait(KEYS))
            waiters[-1].add_done_callback(lambda waiter, number=number: told.append(number))
        waiters[3].cancel()
        await asyncio.to_thread(server.connect().set, 'barrier', 'open')
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*waiters, return_exceptions=True)
        waits.close()

    asyncio.run(wait_and_open())
    assert told == [3, 0, 1, 2, 4, 5, 6, 7]
