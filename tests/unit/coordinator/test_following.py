# SPDX-License-Identifier: Apache-2.0
"""A board that follows: the ranks meet and end their rounds elsewhere, and it tells them of deaths.

Explored in every order, as in `model`. Some rank may have no way to the coordinator.

D1  A round is told to be over only if a process of it died or left it, or its link broke.
D2  The death of a process that the board has seen in the round is told to all that reach it.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from moevement_ext.coordinator.board import Board
from moevement_ext.coordinator.statements import (
    Hello,
    JobStart,
    Move,
    RoundOver,
    RoundPhase,
    RoundPlace,
    roster_of,
)
from tests.unit.coordinator.model import Model, change, token_of


class Limits(NamedTuple):
    """As those of `model`."""

    ranks: int = 2
    deaths: int = 0
    breaks: int = 0
    restarts: int = 0
    pauses: int = 0
    """Of the coordinator, after which it learns again."""
    cut_off: int = 0
    """Ranks without a way to the coordinator."""


class Rank(msgspec.Struct, frozen=True):
    own: Hello
    reaches: bool = True
    connected: bool = False
    up: tuple[Hello | Move, ...] = ()
    told: int = 0
    """The newest round of which it has heard that it is over."""
    done: bool = False

    @property
    def within(self) -> int:
        """The round that it is in, or 0."""
        return self.own.round[0] if self.own.round else 0


class State(msgspec.Struct, frozen=True):
    ranks: tuple[Rank, ...]
    board: tuple[Hello, ...] = ()
    absent: tuple[int, ...] = ()
    was_in: tuple[tuple[int, int], ...] = ()
    learning: bool = True
    round: int = 1
    hurt: int = 0
    """The newest round that something has happened to."""
    unseen: bool = False
    """Some process died that the board had not seen in the round."""
    used: tuple[int, ...] = (0,) * 4
    wrong: str = ''


class Following(Model):
    """Steps of the ranks, and of the coordinator."""

    def __init__(self, limits: Limits) -> None:
        self.size, self.most = limits.ranks, limits[1:5]
        self.cut_off = limits.cut_off
        self.job = JobStart(0, limits.ranks, '')

    def start(self) -> Any:
        return State(tuple(self._new(rank, rank) for rank in range(self.size)))

    def _new(self, rank: int, identity: int) -> Rank:
        return Rank(Hello(rank, token_of(identity), self.job, identity), rank >= self.cut_off)

    def _board(self, s: State) -> Board:
        board = Board(self.job, lambda reports: b'', leads=False)
        board.members = {one.rank: one for one in s.board}
        board.absent, board._was_in = frozenset(s.absent), dict(s.was_in)
        board.learning = s.learning
        return board

    def _concluded(self, s: State, board: Board) -> State:
        s = change(
            s,
            board=tuple(one for _, one in sorted(board.members.items())),
            absent=tuple(sorted(board.absent)),
            was_in=tuple(sorted(board._was_in.items())),
            learning=board.learning,
        )
        found = board.conclude()
        for rank in board.members:
            for message in board.for_rank(rank, found):
                if isinstance(message, RoundOver) and message.number > s.hurt:
                    s = change(s, wrong='D1: a round is over for no reason')
                if isinstance(message, RoundOver) and s.ranks[rank].connected:
                    s = self._with(s, rank, told=max(message.number, s.ranks[rank].told))
        return s

    @staticmethod
    def _with(s: Any, rank: int, **more: Any) -> Any:
        one = change(s.ranks[rank], **more)
        return change(s, ranks=(*s.ranks[:rank], one, *s.ranks[rank + 1 :]))

    def _moves(self, s: State, rank: int, place: RoundPlace) -> State:
        one = s.ranks[rank]
        up = (*one.up, Move(place)) if one.connected else ()
        return self._with(s, rank, own=one.own.with_statement(Move(place)), up=up)

    def _gone(self, s: State, rank: int, is_missed: bool = True) -> State:
        board, connected = self._board(s), s.ranks[rank].connected
        s = self._with(s, rank, connected=False, up=())
        if not connected:
            return s
        board.gone(rank, is_missed)
        return self._concluded(s, board)

    def _strikes(self, s: State, fault: int, hurts: bool = True) -> State:
        used = [*s.used]
        used[fault] += 1
        return change(s, used=tuple(used), hurt=s.round if hurts else s.hurt)

    def steps(self, s: Any) -> Iterator[tuple[str, Any]]:
        roster = roster_of(one.own.token for one in s.ranks)
        outside = any(not one.within for one in s.ranks)
        left = any(one.own.place.phase is RoundPhase.LEFT for one in s.ranks)
        if s.hurt == s.round and not any(one.within for one in s.ranks):
            yield 'they meet', change(s, round=s.round + 1)
        for rank, one in enumerate(s.ranks):
            if one.done:
                continue
            if not one.connected and one.reaches and one.own.place.been:
                yield f'{rank} connects', self._with(s, rank, connected=True, up=(one.own,))
            if one.up:
                yield f'C hears {rank}', self._heard(s, rank)
            if not one.within and s.hurt < s.round:
                inside = RoundPlace(RoundPhase.IN, s.round, roster, been=True)
                yield f'{rank} enters', self._moves(s, rank, inside)
            if not one.within:
                continue
            if one.told >= s.round or (left and s.hurt == s.round):
                after = RoundPlace(RoundPhase.LEFT, s.round, been=True)
                yield f'{rank} leaves', self._moves(s, rank, after)
            if s.hurt < s.round and not outside:
                yield f'{rank} ends', self._with(self._gone(s, rank, False), rank, done=True)
            yield from self._faults(s, rank)
        yield from self._times(s)

    def _faults(self, s: State, rank: int) -> Iterator[tuple[str, State]]:
        one = s.ranks[rank]
        all_in = all(other.within == s.round and not other.done for other in s.ranks)
        if s.used[0] < self.most[0] and all_in:
            seen = any(on.rank == rank and on.round == one.own.round for on in s.board)
            after = self._gone(self._strikes(s, 0), rank)
            new = self._new(rank, self.size + s.used[0])
            after = self._with(after, rank, own=new.own, told=0)
            yield f'{rank} dies', change(after, unseen=s.unseen or not seen)
        if s.used[1] < self.most[1] and one.connected and all_in:
            yield f'link of {rank} breaks', self._gone(self._strikes(s, 1), rank)

    def _times(self, s: State) -> Iterator[tuple[str, State]]:
        on_board = {one.rank for one in s.board}
        for rank, _ in s.was_in:
            if rank not in on_board and rank not in s.absent and not s.ranks[rank].done:
                board = self._board(s)
                board.miss([rank])
                yield f'{rank} is missed', self._concluded(s, board)
        if s.learning:
            board = self._board(s)
            board.learned()
            yield 'C has learned', self._concluded(s, board)
        elif s.used[3] < self.most[3]:
            yield 'C was stopped', change(self._strikes(s, 3, hurts=False), learning=True)
        if s.used[2] < self.most[2]:
            cut = tuple(change(one, connected=False, up=()) for one in s.ranks)
            lost = change(s, ranks=cut, board=(), absent=(), was_in=(), learning=True)
            yield 'C dies', self._strikes(lost, 2, hurts=False)

    def _heard(self, s: State, rank: int) -> State:
        message, rest = s.ranks[rank].up[0], s.ranks[rank].up[1:]
        board = self._board(s)
        if isinstance(message, Hello):
            assert board.greet(message) is None
        else:
            board.hear(rank, message)
        return self._concluded(self._with(s, rank, up=rest), board)

    def wrong(self, s: Any) -> str:
        return str(s.wrong)

    def stuck(self, s: Any) -> str:
        waits = s.hurt == s.round and any(one.within and one.reaches for one in s.ranks)
        is_known = not (s.unseen or s.used[1] or s.used[2])
        return 'D2: ranks wait for a dead one' if waits and is_known else ''


@pytest.mark.parametrize(
    'limits',
    [
        Limits(deaths=1),
        Limits(deaths=1, pauses=1),
        Limits(breaks=1),
        Limits(restarts=1),
        Limits(cut_off=1),
        Limits(cut_off=1, restarts=1),
        pytest.param(Limits(deaths=2, breaks=1), marks=pytest.mark.thorough),
        pytest.param(Limits(deaths=1, restarts=1, pauses=1), marks=pytest.mark.thorough),
        pytest.param(Limits(ranks=3, deaths=1), marks=pytest.mark.thorough),
        pytest.param(Limits(ranks=3, deaths=1, cut_off=1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_only_deaths_are_told_in_every_order(limits: Limits) -> None:
    states, wrong = Following(limits).explored(400_000)
    assert not wrong and states > 20


def forgets_that_it_saw_it(self: Board, rank: int, is_missed: bool = True) -> None:
    GONE(self, rank, is_missed=False)


def misses_whoever_said_goodbye(self: Board, rank: int, is_missed: bool = True) -> None:
    GONE(self, rank)


def misses_all(self: Board) -> None:
    self._leads = True
    LEARNED(self)


GONE, LEARNED, INIT = Board.gone, Board.learned, Board.__init__


@pytest.mark.parametrize(
    ('invariant', 'name', 'mutation', 'limits'),
    [
        ('D1', 'gone', misses_whoever_said_goodbye, Limits(pauses=1)),
        ('D1', 'learned', misses_all, Limits(cut_off=1)),
        ('D1', '__init__', None, Limits(deaths=1)),
        ('D2', 'gone', forgets_that_it_saw_it, Limits(deaths=1)),
    ],
)
def test_a_mutation_is_noticed(
    invariant: str,
    name: str,
    mutation: Callable | None,
    limits: Limits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leads(self: Board, *job: Any, **more: Any) -> None:
        INIT(self, *job)

    monkeypatch.setattr(Board, name, mutation or leads)
    _, wrong = Following(limits).explored(40_000)
    assert wrong.startswith(invariant)
