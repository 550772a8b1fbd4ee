# SPDX-License-Identifier: Apache-2.0
"""A rank's connection to the coordinator: one thread with an asyncio loop.

The thread owns the rank's statements (a `Hello`), which any thread may change, in order. It states
all of them again on every new connection, until it is closed or fenced, and training does not
notice. No callback on this thread may take longer than 10 ms.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial

from moevement_ext.coordinator.statements import (
    TO_RANK,
    AllSaid,
    Answered,
    Ask,
    Beat,
    Bye,
    Fenced,
    FromRank,
    Hello,
    Move,
    Promise,
    Promises,
    Round,
    RoundMet,
    RoundOver,
    RoundPhase,
    RoundPlace,
    Say,
    Settled,
    ToRank,
    carry_out,
    framed,
    receive,
)
from moevement_ext.logger import logger_of
from moevement_ext.replicate.secret import introducing

logger = logger_of(__name__)

BEAT_S = 1.0
_CONNECT_S = 5.0
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)
# A machine that is gone answers nothing; a coordinator that is stopped, or busy, still does.
_UNANSWERED_MS = 30_000
_UNREAD_BYTES = 64 * 2**20
_TO_END_S = 5.0
_TOLD_S = 60.0
# A coordinator that is started again refuses no client, as its keeper holds the socket.
_GONE_S = 0.5
_GONE = 'the process that keeps the coordinator is lost'
_OUT_OF_REACH = (
    'the coordinator at %s:%d has been out of reach for %g s, so no window counts as persisted '
    '(%s): let all nodes reach that port, or end the process that starts it: the launcher, the '
    'torchrun agent of the first node, or rank 0'
)

type News = RoundMet | RoundOver | Settled | AllSaid | Fenced


class CoordinatorClient:
    """States what a rank knows, and hears what follows from the statements of all.

    Args:
        address: host and port of the coordinator.
        hello: the process, with its first statements.
        heard: called on the client's thread with news about the place of this process; `Fenced` is
            the last one.
        beat: what the training thread does, called on the client's thread every second.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        hello: Hello,
        heard: Callable[[News], None],
        beat: Callable[[], Beat] = Beat,
    ) -> None:
        self._address, self._secret = address, secret
        self._own = hello
        self._heard, self._beat = heard, beat
        self._asked: dict[int, tuple[Ask, Future[dict[int, bytes]]]] = {}
        self._asking = 0
        self._writer: asyncio.StreamWriter | None = None
        self._fenced = False
        self._follows = False
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._run())
        self._thread = threading.Thread(target=self._serve, name='sparse-ckpt-client', daemon=True)
        self._thread.start()

    # Any thread; none of these waits

    def join(self, report: bytes) -> None:
        """Join the next round; outside of a round."""
        self._post(lambda: self._move(self._own.place.joined(report)))

    def leave(self, number: int, why: str) -> None:
        """End a round, because this process cannot go on in it."""
        self._post(lambda: self._move(self._own.place.over(number, why)))

    def enter(self, about: Round, address: tuple[str, int]) -> None:
        """Enter a round that the ranks have met by themselves; the coordinator is at `address`.

        Then they also leave it by themselves, after its end was heard.
        """

        def act() -> None:
            self._follows = True
            if address != self._address:
                self._address = address
                if self._writer is not None:
                    self._writer.transport.abort()
            if about != self._own.round:
                self._move(RoundPlace(RoundPhase.IN, *about, been=True))

        self._post(act)

    def say(self, name: str, value: bytes, about: Round | None = None) -> None:
        """Say a value about a round, if this process is still in it, or about itself."""
        self._post(partial(self._state, Say(name, value, about)))

    def promise(self, about: Round, name: str, change: Callable[[Promises], Promises]) -> None:
        """Change the promises in a round, if this process is still in it.

        `change` is called on the client's thread.
        """

        def act() -> None:
            old = self._own.promises.get(name, Promises())
            if about == self._own.round and (new := change(old)) != old:
                self._state(Promise(about, name, new))

        self._post(act)

    def ask(self, name: str, ranks: Collection[int]) -> 'Future[dict[int, bytes]]':
        """Ask what these ranks have said under a name; those that have not are left out.

        The answer waits for a connection.
        """
        answer = Future[dict[int, bytes]]()

        def act() -> None:
            self._asking += 1
            question = Ask(self._asking, name, tuple(ranks))
            self._asked[self._asking] = question, answer
            self._send(question)

        self._post(act)
        return answer

    def close(self) -> None:
        """End; the coordinator does not miss this process."""

        def end() -> None:
            self._send(Bye())
            self._task.cancel()

        self._post(end)
        if threading.current_thread() is not self._thread:
            self._thread.join(_TO_END_S)

    def _post(self, act: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(act)

    # The client's thread

    def _serve(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        for _, answer in self._asked.values():
            answer.cancel()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _run(self) -> None:
        failures, lost_at, told, left = 0, self._loop.time(), False, 0
        while not self._fenced:
            try:
                await self._connected()
            except (OSError, EOFError) as error:
                if self._writer is not None:
                    failures, lost_at, told = 0, self._loop.time(), False
                    left = self._own.place.number
                failures += 1
                refused = isinstance(error, ConnectionRefusedError)
                if refused and self._follows and self._loop.time() - lost_at > _GONE_S:
                    self._hear(RoundOver(left, _GONE))
                if not told and self._loop.time() - lost_at > _TOLD_S:
                    told = True
                    logger.warning(_OUT_OF_REACH, *self._address, _TOLD_S, error)
            finally:
                if self._writer is not None:
                    self._writer.close()
                self._writer = None
            await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1])

    async def _connected(self) -> None:
        """Connect, state everything, and hear until the connection ends."""
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(*(address := self._address))
            try:
                refused = await carry_out(introducing(self._secret), reader, writer)
                if refused is not None:
                    raise ConnectionError(refused)
                if address != self._address:
                    raise ConnectionError('the coordinator is elsewhere now')
            except BaseException:
                writer.close()
                raise
        sock = writer.get_extra_info('socket')
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
        self._writer = writer
        self._send(self._own)
        for question, _ in self._asked.values():
            self._send(question)
        beats = asyncio.ensure_future(self._beats())
        try:
            while not self._fenced:
                self._hear(await receive(reader, TO_RANK))
        finally:
            beats.cancel()

    async def _beats(self) -> None:
        while True:
            self._send(self._beat())
            await asyncio.sleep(BEAT_S)

    def _hear(self, message: ToRank) -> None:
        own = self._own
        match message:
            case RoundMet(number, roster) if place := own.place.met(number, roster):
                self._move(place)
            case RoundOver(number, why) if place := own.place.over(number, why):
                if not self._follows:
                    self._move(place)
            case Settled(about) | AllSaid(about) if about == own.round:
                pass
            case Fenced():
                self._fenced = True
            case Answered(number, values) if number in self._asked:
                with suppress(InvalidStateError):  # the caller has cancelled it
                    self._asked.pop(number)[1].set_result(values)
                return
            case _:
                return
        try:
            self._heard(message)
        except Exception:
            logger.exception('the coordinator said %s, but', message)

    def _move(self, place: RoundPlace | None) -> None:
        if place is not None:
            self._state(Move(place))

    def _state(self, message: Move | Promise | Say) -> None:
        before, self._own = self._own, self._own.with_statement(message)
        if self._own is not before:
            self._send(message)

    def _send(self, message: FromRank) -> None:
        """Send, if there is a connection; all statements are sent again on the next one."""
        if self._writer is None or self._writer.is_closing():
            return
        self._writer.write(framed(message))
        if self._writer.transport.get_write_buffer_size() > _UNREAD_BYTES:
            self._writer.transport.abort()
