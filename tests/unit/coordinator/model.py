# SPDX-License-Identifier: Apache-2.0
"""A job on the real board, and all that can happen to it, one step at a time.

Every process has two files for windows, states what it knows, and applies what it hears with the
product's own functions. Links keep the order of messages; a broken one may still deliver what was
under way to the process. A process that was cut off stays alive, and returns after another one was
started for its rank.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from moevement_ext.coordinator import board as boards
from moevement_ext.coordinator.statements import (
    Fenced,
    Hello,
    JobStart,
    Move,
    Promise,
    Promises,
    RoundMet,
    RoundOver,
    RoundPhase,
    RoundPlace,
    Settled,
)
from moevement_ext.memory.window.name import NOTHING_AGREED, Agreed, WindowName

NAME = 'memory'
_KEY = msgspec.msgpack.Encoder(order='deterministic')
_UNPACK = msgspec.msgpack.Decoder()


class Limits(NamedTuple):
    """Size of the job, and how often each fault happens."""

    ranks: int = 2
    windows: int = 3
    deaths: int = 0
    restarts: int = 0
    """Of the coordinator."""
    breaks: int = 0
    """Of links."""
    cut_off: int = 0
    """Processes that are replaced after they were in a round, and return."""
    skips: int = 0
    """Windows that a rank gives up."""
    refused: int = 0
    """Verdicts that must take an older window."""
    learns: bool = False
    """The time of learning may be too short for some process to connect."""


class Process(msgspec.Struct, frozen=True):
    own: Hello
    identity: int
    files: tuple[int, ...] = ()
    """Starts of its complete windows."""
    captured: int = 0
    agreed: Agreed = NOTHING_AGREED
    verdict: int = 0
    connected: bool = False
    up: tuple[object, ...] = ()
    down: tuple[object, ...] = ()
    told: dict[str, object] = {}

    @property
    def rank(self) -> int:
        return self.own.rank


class State(msgspec.Struct, frozen=True):
    """`processes` by rank, then those that were replaced but live on."""

    processes: tuple[Process, ...]
    board: tuple[Hello, ...] = ()
    absent: tuple[int, ...] = ()
    learning: bool = True
    used: tuple[int, ...] = (0,) * 6
    declared: tuple[tuple[tuple[int, int], int, tuple[int, ...]], ...] = ()
    """Rounds: name, verdict, and the processes."""
    persisted: bool = False
    """Some window was."""
    wrong: str = ''

    @property
    def members(self) -> dict[int, Hello]:
        return {one.rank: one for one in self.board}

    def with_board(self, members: dict[int, Hello]) -> 'State':
        return change(self, board=tuple(one for _, one in sorted(members.items())))


DEATHS, RESTARTS, BREAKS, CUT_OFF, SKIPS, REFUSED = range(6)
change = msgspec.structs.replace


def name_of(start: int) -> WindowName:
    return WindowName(start, 'h_p')


def decide(reports: list[bytes]) -> bytes:
    """The newest window that all have, or the oldest if one refuses the newest; 0 without any."""
    read = [_UNPACK.decode(report) for report in reports]
    whole = sorted(set(read[0][0]).intersection(*(files for files, _ in read))) or [0]
    return _KEY.encode(whole[0] if any(refuses for _, refuses in read) else whole[-1])


def report(files: tuple[int, ...], refuses: bool = False) -> bytes:
    return _KEY.encode((files, refuses))


def token_of(identity: int) -> int:
    return (identity + 1) * 0x9E3779B97F4A7C15 % 2**63


class Model:
    """Steps of a job within limits; `violations` are the broken invariants, by name."""

    def __init__(self, limits: Limits, token: Callable[[int], int] = token_of) -> None:
        self.limits = limits
        self.job = JobStart(0, limits.ranks, '')
        self._token = token

    def start(self) -> State:
        return State(tuple(self._new(rank, rank) for rank in range(self.limits.ranks)))

    def _new(self, rank: int, identity: int, files: tuple[int, ...] = ()) -> Process:
        place = RoundPlace().joined(report(files))
        own = Hello(rank, self._token(identity), self.job, identity, place)
        return Process(own, identity, files)

    # The coordinator

    def _board(self, s: State) -> boards.Board:
        board = boards.Board(self.job, decide)
        board.members, board.absent = s.members, frozenset(s.absent)
        board.learning = s.learning
        return board

    def _concluded(self, s: State, board: boards.Board) -> State:
        s = s.with_board(board.members)
        s = change(s, absent=tuple(sorted(board.absent)), learning=board.learning)
        found = board.conclude()
        s = self._checked(s, found)
        fenced = set()
        for at, process in enumerate(s.processes):
            if not process.connected or not self._speaks(s, process):
                continue
            for message in board.for_rank(process.rank, found):
                key = type(message).__name__ + getattr(message, 'name', '')
                now = s.processes[at]
                if now.told.get(key) != message:
                    told = {**now.told, key: message}
                    s = self._put(s, at, change(now, told=told, down=(*now.down, message)))
                if isinstance(message, Fenced):
                    s = self._put(s, at, change(s.processes[at], connected=False, up=()))
                    fenced.add(process.rank)
        if not fenced:
            return s
        return s.with_board({r: m for r, m in s.members.items() if r not in fenced})

    def _checked(self, s: State, found: boards.Conclusions) -> State:
        """Check the conclusions against all that were drawn before."""
        here = [self._speaker(s, rank) for rank in range(self.limits.ranks)]
        identities = tuple(-1 if one is None else one.identity for one in here)
        if found.met is not None:
            name = found.met.number, found.met.roster
            new = name, _UNPACK.decode(found.met.verdict), identities
            for old in s.declared:
                if old[0] == name and old[1] != new[1]:
                    s = change(s, wrong='C1: two verdicts in one round')
                if old[0] == name and old[2] != new[2]:
                    s = change(s, wrong='C2: a round with other processes goes on')
            if new not in s.declared:
                s = change(s, declared=tuple(sorted({*s.declared, new})))
        if any(self._ends_a_round_of_others(s, one, found) for one in here if one):
            s = change(s, wrong='C6: a process ends a round that was met without it')
        for settled in found.in_round:
            assert isinstance(settled, Settled)
            newest = settled.agreed.persisted
            s = change(s, persisted=s.persisted or newest is not None)
            lacking = [p for p in s.processes if p.own.round == settled.round
                       and newest and newest.start in p.own.promises[NAME].given_up
                       ]  # fmt: skip
            if lacking:
                s = change(s, wrong='C4: a window that a rank has given up is persisted')
        return s

    def _ends_a_round_of_others(
        self, s: State, process: Process, found: boards.Conclusions
    ) -> bool:
        others = {one.round for one in s.board if one.rank != process.rank}
        name, place = others.pop() if len(others) == 1 else None, s.members[process.rank].place
        if name is None or len(s.board) < self.limits.ranks or not place.been:
            return False
        if place.number > name[0] or (place.number == name[0] and place.phase != RoundPhase.JOINED):
            return False
        met = [identities for known, _, identities in s.declared if known == name]
        return bool(met) and process.identity not in met[0] and found.over.number >= name[0]

    def _speaker(self, s: State, rank: int) -> Process | None:
        """The process that is on the board for a rank."""
        found = (p for p in s.processes if p.rank == rank and p.connected and self._speaks(s, p))
        return next(found, None)

    def _speaks(self, s: State, process: Process) -> bool:
        return (one := s.members.get(process.rank)) is not None and (one.token == process.own.token)

    def _hears(self, s: State, at: int) -> State:
        process = s.processes[at]
        message, rest = process.up[0], process.up[1:]
        s = self._put(s, at, change(process, up=rest))
        board = self._board(s)
        if not isinstance(message, Hello):
            if not self._speaks(s, process):
                return s
            board.hear(process.rank, message)  # type: ignore[arg-type]
            return self._concluded(s, board)
        process = s.processes[at]
        try:
            refused = board.greet(message)
        except ConnectionError:
            return self._put(s, at, change(process, connected=False, up=()))
        if refused:
            down = (*process.down, refused)
            return self._put(s, at, change(process, down=down, connected=False, up=()))
        for other, one in enumerate(s.processes):
            if other != at and one.rank == process.rank and one.connected:
                down = (*one.down, Fenced('replaced'))
                if self._speaks(s, one):
                    s = self._put(s, other, change(one, down=down, connected=False, up=()))
        return self._concluded(s, board)

    # Processes

    @staticmethod
    def _put(s: State, at: int, process: Process) -> State:
        return change(s, processes=(*s.processes[:at], process, *s.processes[at + 1 :]))

    def _say(self, s: State, at: int, process: Process, *said: Move | Promise) -> State:
        own = process.own
        for one in said:
            own = own.with_statement(one)
        up = (*process.up, *said) if process.connected else process.up
        return self._put(s, at, change(process, own=own, up=up))

    def _promises(self, process: Process) -> Promises:
        return process.own.promises.get(NAME, Promises())

    def _told(self, s: State, at: int) -> State:
        process = s.processes[at]
        message, rest = process.down[0], process.down[1:]
        process = change(process, down=rest)
        own = process.own
        match message:
            case RoundOver(number, why) if place := own.place.over(number, why):
                moved = change(process, agreed=NOTHING_AGREED)
                return self._say(s, at, moved, Move(place))
            case RoundMet(number, roster, verdict) if place := own.place.met(number, roster):
                base = _UNPACK.decode(verdict)
                files = tuple(one for one in process.files if one <= base)
                promises = Promises(tuple(map(name_of, files)))
                process = change(process, files=files, captured=base, verdict=base)
                promised = Promise((number, roster), NAME, promises)
                return self._say(s, at, process, Move(place), promised)
            case Settled(about, _, agreed) if about == own.round:
                agreed = process.agreed.then(agreed)
                files = tuple(one for one in process.files if not agreed.is_given_up(one))
                return self._put(s, at, change(process, agreed=agreed, files=files))
            case Fenced():
                if at < self.limits.ranks:
                    at, s = self._back_to_predecessor(s, at)
                return change(s, processes=(*s.processes[:at], *s.processes[at + 1 :]))
        return self._put(s, at, process)

    def _back_to_predecessor(self, s: State, at: int) -> tuple[int, State]:
        """Let a process go that was in a round, if the others have met with its predecessor since.

        That one is not fenced then.
        """
        new = s.processes[at]
        newest = max((name[0] for name, _, _ in s.declared), default=0)
        met = {one for name, _, identities in s.declared if name[0] == newest for one in identities}
        for other, one in enumerate(s.processes):
            is_fenced = any(isinstance(message, Fenced) for message in one.down)
            if other != at and one.rank == new.rank and one.identity in met and not is_fenced:
                if new.own.place.been:
                    return other, self._put(s, at, one)
        return at, change(s, wrong='C6: the present process of a rank is fenced')

    def _captures(self, s: State, at: int) -> Iterator[tuple[str, State]]:
        process = s.processes[at]
        agreed, window = process.agreed, process.captured + 1
        if process.own.round is None or window > self.limits.windows:
            return
        if agreed.is_given_up(window):
            yield f'{at} passes {window}', self._put(s, at, change(process, captured=window))
            return
        free = len(process.files) < 2
        newest = agreed.persisted.start if agreed.persisted else 0
        old = [one for one in process.files if self._may_overwrite(one, newest)]
        about, promises = process.own.round, self._promises(process)
        if self._may(s, SKIPS) and window < self.limits.windows:
            given_up = Promise(about, NAME, promises.without([window - 1, window], agreed))
            skipped = change(process, captured=window)
            yield f'{at} skips {window}', self._say(self._use(s, SKIPS), at, skipped, given_up)
        if not free and not old:
            return
        left = process.files if free else tuple(one for one in process.files if one != old[0])
        if not free and self._may(s, DEATHS):
            yield f'{at} dies overwriting {old[0]}', self._dies(s, at, left)
        promised = Promise(about, NAME, promises.with_window(name_of(window), agreed))
        done = change(process, files=tuple(sorted({*left, window})), captured=window)
        yield f'{at} has {window}', self._say(s, at, done, promised)

    def _may_overwrite(self, window: int, persisted: int) -> bool:
        return window < persisted

    def _may(self, s: State, fault: int) -> bool:
        return s.used[fault] < self.limits[fault + 2]

    def _use(self, s: State, fault: int) -> State:
        used = [*s.used]
        used[fault] += 1
        return change(s, used=tuple(used))

    def _off_the_board(self, s: State, process: Process) -> State:
        if not self._speaks(s, process):
            return s
        board = self._board(s)
        board.gone(process.rank)
        return self._concluded(s, board)

    def _identity(self, s: State) -> int:
        return self.limits.ranks + s.used[DEATHS] + s.used[CUT_OFF]

    def _dies(self, s: State, at: int, files: tuple[int, ...]) -> State:
        process = s.processes[at]
        new = self._new(process.rank, self._identity(s), files)
        s = self._off_the_board(s, process)
        return self._put(self._use(s, DEATHS), at, new)

    def steps(self, s: State) -> Iterator[tuple[str, State]]:
        for at, process in enumerate(s.processes):
            present = at < self.limits.ranks
            if process.connected and process.up:
                yield f'C hears {at}', self._hears(s, at)
            if process.down:
                yield f'{at} hears {process.down[0]}', self._told(s, at)
            if not process.connected and not any(isinstance(m, Fenced) for m in process.down):
                again = change(process, connected=True, up=(process.own,), down=(), told={})
                yield f'{at} connects', self._put(s, at, again)
            if process.own.place.phase is RoundPhase.LEFT:
                joins = Move(process.own.place.joined(report(process.files)))
                yield f'{at} joins', self._say(s, at, process, joins)
                if self._may(s, REFUSED):
                    joins = Move(process.own.place.joined(report(process.files, True)))
                    yield f'{at} refuses', self._say(self._use(s, REFUSED), at, process, joins)
            if not present:
                continue
            yield from self._captures(s, at)
            if self._may(s, DEATHS):
                yield f'{at} dies', self._dies(s, at, process.files)
            if process.connected and self._may(s, BREAKS):
                broken = self._off_the_board(self._use(s, BREAKS), process)
                lost = change(broken.processes[at], connected=False, up=())
                yield f'link of {at} breaks', self._put(broken, at, lost)
            if process.connected and process.own.place.been and self._may(s, CUT_OFF):
                yield f'{at} is cut off and replaced', self._replaced(s, at)
        yield from self._at_the_coordinator(s)

    def _replaced(self, s: State, at: int) -> State:
        process = s.processes[at]
        new = self._new(process.rank, self._identity(s), process.files)
        s = self._off_the_board(self._use(s, CUT_OFF), process)
        old = change(s.processes[at], connected=False, up=(), down=())
        return change(self._put(s, at, new), processes=(*self._put(s, at, new).processes, old))

    def _at_the_coordinator(self, s: State) -> Iterator[tuple[str, State]]:
        for rank in range(self.limits.ranks):
            if rank not in s.members and rank not in s.absent:
                board = self._board(s)
                board.miss([rank])
                yield f'{rank} is missed', self._concluded(s, board)
        if s.learning and self.limits.learns:
            board = self._board(s)
            board.learned()
            yield 'C has learned', self._concluded(s, board)
        if self._may(s, RESTARTS):
            cut = tuple(change(one, connected=False, up=()) for one in s.processes)
            lost = change(s, processes=cut, board=(), absent=(), learning=True)
            yield 'C dies', self._use(lost, RESTARTS)

    # Invariants

    def wrong(self, s: State) -> str:
        """The invariant that is broken, or an empty text."""
        present = s.processes[: self.limits.ranks]
        if s.persisted and not set(present[0].files).intersection(*(p.files for p in present)):
            return 'C3: no window is whole any more'
        verdicts: dict[object, int] = {}
        for one in s.processes:
            if one.own.round and verdicts.setdefault(one.own.round, one.verdict) != one.verdict:
                return 'C1: processes of a round have two verdicts'
        faults = sum(s.used[one] for one in (DEATHS, BREAKS, CUT_OFF))
        if (
            not faults
            and not self.limits.learns
            and any(one.own.place.number != 1 for one in present)
        ):
            return 'C5: a round ended without a fault of a rank'
        return s.wrong

    def stuck(self, s: State) -> str:
        """Why a state in which nothing more can happen is no good end, or an empty text."""
        present = s.processes[: self.limits.ranks]
        rounds = {one.own.round for one in present}
        done = all(one.captured == self.limits.windows for one in present)
        if len(rounds) == 1 and None not in rounds and done and len(s.processes) == len(present):
            return ''
        return 'C7: processes wait for ever'

    def explored(self, most: int) -> tuple[int, str]:
        """Breadth first: the number of states, and the first broken invariant with its steps.

        Fails beyond `most` states.
        """
        first = self.start()
        came: dict[bytes, tuple[bytes, str]] = {_KEY.encode(first): (b'', '')}
        queue = deque([first])
        while queue:
            s = queue.popleft()
            key, quiet = _KEY.encode(s), True
            for step, after in self.steps(s):
                quiet = False
                new = _KEY.encode(after)
                if new in came:
                    continue
                came[new] = key, step
                assert len(came) <= most, f'more than {most} states'
                if wrong := self.wrong(after):
                    return len(came), f'{wrong}: {_path(came, new)}'
                queue.append(after)
            if quiet and (wrong := self.stuck(s)):
                return len(came), f'{wrong}: {_path(came, key)}'
        return len(came), ''


def _path(came: dict[bytes, tuple[bytes, str]], key: bytes) -> str:
    steps: list[str] = []
    while came[key][1]:
        key, step = came[key]
        steps.append(step)
    return '; '.join(reversed(steps))
