# SPDX-License-Identifier: Apache-2.0
"""The coordinator: the board behind a socket, on one asyncio loop.

Nothing waits for a peer: a message that a peer does not read is buffered, and a peer that reads
nothing for long is cut off. A peer that has not proved its membership has 5 s and one of 64 places,
and sends at most 64 KiB.

The coordinator judges the time of others by its own: a pause between two looks counts 2 s at most,
and after a longer one it knows nothing about absence, and learns again.
"""

import asyncio
import socket
import time
from collections.abc import Mapping
from functools import partial

from moevement_ext.coordinator.board import Board, Rule
from moevement_ext.coordinator.statements import (
    FROM_RANK,
    Answered,
    Ask,
    Beat,
    Bye,
    Conclusion,
    Fenced,
    FromRank,
    Hello,
    Move,
    Promise,
    Say,
    Show,
    Shown,
    ToRank,
    Welcome,
    carry_out,
    framed,
    receive,
)
from moevement_ext.logger import logger_of
from moevement_ext.replicate.secret import admitting

logger = logger_of(__name__)

GREETING_S = 5.0
MOST_STRANGERS = 64
STRANGER_BYTES = 64 * 2**10
UNREAD_BYTES = 64 * 2**20
"""Messages that a peer may leave unread."""
LEARNING_S = 10.0
TO_RECONNECT_S = 1.0
_LOOK_S = 0.5
# A machine that is gone answers nothing, and counts as lost after half a minute.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
)
_MOST_BETWEEN_LOOKS_S = 2.0
# Part of the CPU time that conclusions may take, as each looks at all ranks.
_CONCLUDING = 0.2


class _Connected:
    """The connection of an authenticated process, and what it was told on it."""

    def __init__(self, writer: asyncio.StreamWriter, leads: bool) -> None:
        self.hello: Hello | None = None
        self.silent_s = 0.0
        self._writer, self._leads = writer, leads
        self._told: dict[tuple[type, str], Conclusion] = {}

    def conclude(self, message: Conclusion) -> None:
        """Tell a conclusion, unless it was told last."""
        key = type(message), getattr(message, 'name', '')
        if self._told.get(key) != message:
            self._told[key] = message
            self.tell(message)

    def tell(self, message: ToRank) -> None:
        self._writer.write(framed(message))
        if self._writer.transport.get_write_buffer_size() > UNREAD_BYTES:
            logger.warning('a process reads none of its messages; its connection is cut')
            self.cut()

    def fence(self, message: Fenced) -> None:
        """Tell the process to end, and close the connection, in time if it does not read.

        Where others lead it is not told: it connects again, until it ends or is alone.
        """
        if self._leads:
            self.tell(message)
        self._writer.close()
        asyncio.get_running_loop().call_later(GREETING_S, self.cut)

    def cut(self) -> None:
        self._writer.transport.abort()


class Coordinator:
    """Serves the board of a job to the processes that know its secret.

    Used on the loop that runs `serve` only. `decide` and `rules` are those of `Board`. Unless it
    `leads`, others begin and end the rounds and processes, and it tells only what follows in a
    round, and its end. Then a process that was never connected is not missed: it may have no way to
    here.
    """

    def __init__(
        self,
        secret: bytes,
        decide: Rule,
        rules: Mapping[str, Rule] | None = None,
        leads: bool = True,
    ) -> None:
        self.board: Board | None = None
        """None while no process is connected."""
        self._secret = secret
        self._decide, self._rules = decide, rules
        self._leads = leads
        self._peers: dict[int, _Connected] = {}  # by rank
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._learned_s = 0.0
        self._concluding: asyncio.TimerHandle | None = None
        self._took_s = 0.0

    async def serve(self, listening: socket.socket) -> None:
        """Serve until cancelled; the listening socket stays open."""
        for level, option, value in _KEEPALIVE:
            listening.setsockopt(level, option, value)  # of all its connections
        server = await asyncio.start_server(
            self._accept, sock=listening.dup(), limit=STRANGER_BYTES // 4
        )
        looked_at = time.monotonic()
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                looked_at, before = time.monotonic(), looked_at
                self._look(looked_at - before)
        finally:
            server.close()
            for peer in self._peers.values():
                peer.cut()

    # Connections

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _Connected(writer, self._leads)
        try:
            first = await self._greet(reader, writer)
            if isinstance(first, Hello) and self._admit(peer, first):
                while not isinstance(message := await receive(reader, FROM_RANK), Bye):
                    self._hear(peer, message)
                self._leave(peer, is_missed=False)
            elif isinstance(first, Show):
                peer.tell(Shown(self.board.shown() if self.board else {}))
        except (OSError, EOFError) as error:
            logger.debug('a connection ended: %s', error)
        finally:
            self._leave(peer)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> FromRank:
        """The first message of a peer, which has proved its membership."""
        while len(self._strangers) >= MOST_STRANGERS:
            oldest = next(iter(self._strangers))
            oldest.transport.abort()
            del self._strangers[oldest]
        self._strangers[writer] = None
        # asyncio reads this much at once, and stops reading with twice the limit in its buffer.
        writer.transport.max_size = STRANGER_BYTES // 2  # type: ignore[attr-defined]
        try:
            async with asyncio.timeout(GREETING_S):
                await carry_out(admitting(self._secret), reader, writer)
        finally:
            self._strangers.pop(writer, None)
        return await receive(reader, FROM_RANK)

    def _admit(self, peer: _Connected, hello: Hello) -> bool:
        board = self.board
        if board is None or hello.job.attempt > board.job.attempt:
            for old in self._peers.values():
                old.fence(Fenced('a later attempt of the job has started'))
            self._peers.clear()
            board = self.board = Board(hello.job, self._decide, self._rules, self._leads)
            self._learned_s = 0.0
        if refused := board.greet(hello):
            peer.fence(refused)
            return False
        other = self._peers.get(hello.rank)
        if other is not None:
            other.fence(Fenced('another process has taken its rank'))
        peer.hello = hello
        self._peers[hello.rank] = peer
        peer.tell(Welcome())
        self._conclude_soon()
        return True

    def _hear(self, peer: _Connected, message: FromRank) -> None:
        peer.silent_s = 0.0
        board, rank = self.board, peer.hello.rank if peer.hello else -1
        if board is None or self._peers.get(rank) is not peer:
            raise ConnectionError('another process has its rank')
        match message:
            case Move() | Promise() | Say():
                board.hear(rank, message)
                self._conclude_soon()
            case Beat():
                board.hear(rank, message)
            case Ask(number, name, ranks):
                peer.tell(Answered(number, board.values(name, ranks)))
            case _:
                raise ConnectionError(f'{type(message).__name__} is no message of a rank')

    def _leave(self, peer: _Connected, is_missed: bool = True) -> None:
        rank = peer.hello.rank if peer.hello else -1
        if self._peers.get(rank) is not peer or self.board is None:
            return
        del self._peers[rank]
        self.board.gone(rank, is_missed)
        if not self._peers:
            self.board = None  # the next process may be of another job
            return
        if is_missed:
            miss = partial(self._miss, self.board, rank)
            asyncio.get_running_loop().call_later(TO_RECONNECT_S, miss)
        self._conclude_soon()

    # Time

    def _look(self, passed_s: float) -> None:
        if self.board is None:
            return
        if passed_s > _MOST_BETWEEN_LOOKS_S:
            # Messages may be under way that would end an absence.
            self.board.learning, self._learned_s = True, 0.0
        self._learned_s += min(passed_s, _MOST_BETWEEN_LOOKS_S)
        if self.board.learning and self._learned_s >= LEARNING_S:
            self.board.learned()
            self._conclude_soon()
        for peer in [*self._peers.values()]:
            peer.silent_s += min(passed_s, _MOST_BETWEEN_LOOKS_S)
            limit_s = peer.hello.silent_s if peer.hello else 0.0
            if 0 < limit_s <= peer.silent_s and not self.board.learning:
                peer.cut()

    def _miss(self, board: Board | None, rank: int) -> None:
        if board is not None and self.board is board:  # else a later start of the job
            board.miss([rank])
            self._conclude_soon()

    def _conclude_soon(self) -> None:
        if self._concluding is None:
            pause_s = self._took_s / _CONCLUDING
            self._concluding = asyncio.get_running_loop().call_later(pause_s, self._conclude)

    def _conclude(self) -> None:
        self._concluding = None
        if self.board is None:
            return
        began = time.thread_time()
        found = self.board.conclude()
        for rank, peer in [*self._peers.items()]:
            for message in self.board.for_rank(rank, found):
                if not isinstance(message, Fenced):
                    peer.conclude(message)
                elif self._leads:
                    peer.fence(message)
                    self._leave(peer)
        self._took_s = time.thread_time() - began
