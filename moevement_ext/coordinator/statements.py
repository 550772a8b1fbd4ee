# SPDX-License-Identifier: Apache-2.0
"""Messages between the coordinator and the ranks: a 4-byte length and a tagged msgpack struct.

A connection begins with the greeting of `replicate.secret`, then with a `Hello`, which has all
statements of a process. Both sides keep it, and apply each later statement to it.

    rank -> coordinator: Hello, then Move, Promise, Say, Beat, Ask; Bye
    coordinator -> rank: Welcome, then RoundOver, RoundMet, Settled, AllSaid, Answered; or Fenced
    viewer -> coordinator: Show -> Shown
"""

import asyncio
import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import cast

import msgspec

from moevement_ext.memory.window.name import Agreed, WindowName
from moevement_ext.replicate.secret import MAX_GREETING_BYTES, Steps

VERSION = 1
MOST_BYTES = 16 * 2**20
"""Longest message of a peer that has proved its membership."""


class RoundPhase(IntEnum):
    """Where a process is in its life; the last three name the number of a round."""

    SETTING_UP = 0
    JOINED = 1
    """It has reported, and waits for the verdict."""
    IN = 2
    LEFT = 3
    """Its round is over, and it makes its report for the next one."""


class RoundPlace(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The place of a process in the sequence of rounds."""

    phase: RoundPhase = RoundPhase.SETTING_UP
    number: int = 0
    roster: int = 0
    """Digest of the processes in its round, see `roster_of`."""
    report: bytes = b''
    """For the round that it joined; kept in it, so that the verdict can be drawn again."""
    been: bool = False
    """It has been in a round."""
    why: str = ''
    """Reason why it left."""

    @property
    def last(self) -> int:
        """Number of the last round that the process has been in, or a later one."""
        return self.number - (self.phase is RoundPhase.JOINED)

    def joined(self, report: bytes) -> 'RoundPlace':
        """Join the next round, outside of one."""
        return RoundPlace(RoundPhase.JOINED, self.number + 1, 0, report, self.been)

    def met(self, number: int, roster: int) -> 'RoundPlace | None':
        """Enter the round that all have joined; None if it is another one."""
        if (self.phase, self.number) != (RoundPhase.JOINED, number):
            return None
        return RoundPlace(RoundPhase.IN, number, roster, self.report, been=True)

    def over(self, number: int, why: str) -> 'RoundPlace | None':
        """Follow the others after the end of a round; None if this process has left it already.

        A process that waits for a round joins the next one, with the same report.
        """
        match self.phase:
            case RoundPhase.JOINED if self.number <= number:
                return RoundPlace(RoundPhase.JOINED, number + 1, 0, self.report, self.been)
            case RoundPhase.IN if self.number <= number:
                return RoundPlace(RoundPhase.LEFT, number, been=True, why=why)
            case RoundPhase.LEFT | RoundPhase.SETTING_UP if self.number < number:
                return RoundPlace(self.phase, number, been=self.been, why=why)
        return None


type Round = tuple[int, int]
"""Number and roster, which name a round."""


class JobStart(msgspec.Struct, frozen=True, array_like=True):
    """What all processes of one start of a job have alike."""

    attempt: int
    size: int
    """Number of ranks."""
    settings: str
    """Digest of the settings of protection, and of the code."""


def roster_of(tokens: Iterable[int]) -> int:
    """Digest of processes by their tokens, random numbers of 63 bits."""
    found = 0
    for token in tokens:
        found ^= token
    return found


class Promises(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Windows that a process has with all copies, and those that it will never have.

    No window is in both, at any time: other ranks rely on either.
    """

    windows: tuple[WindowName, ...] = ()
    given_up: tuple[int, ...] = ()
    """Starts, ascending; a full list includes all earlier windows that are not promised."""

    def lacks(self, start: int) -> bool:
        """Whether the windows with this start are given up."""
        promised = any(window.start == start for window in self.windows)
        return not promised and Agreed(None, self.given_up).is_given_up(start)

    def with_window(self, window: WindowName, agreed: Agreed) -> 'Promises':
        """Promise a window, unless it is given up here or, by what was `agreed`, elsewhere."""
        if self.lacks(window.start) or agreed.is_given_up(window.start):
            return self
        kept = {one for one in self.windows if not agreed.is_outdated(one)}
        return Promises(tuple(sorted(kept | {window})), self.given_up)

    def without(self, starts: Iterable[int], agreed: Agreed) -> 'Promises':
        """Give up windows with these starts, unless they are promised or persisted."""
        promised = {window.start for window in self.windows}
        lacking = agreed.with_given_up((*self.given_up, *(set(starts) - promised))).given_up
        return Promises(self.windows, lacking)


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life, and what the training thread does."""

    committed: int = -1
    waits_s: float = 0.0
    """How long the thread has been waiting for other ranks; 0: it computes."""
    on: tuple[int, ...] = ()
    """Ranks that it waits for; empty: any."""


class Move(msgspec.Struct, frozen=True, tag=True):
    """A new place, which takes back all promises and values of the old one."""

    place: RoundPlace


class Promise(msgspec.Struct, frozen=True, tag=True):
    """All promises of one name, in place of the earlier ones."""

    round: Round
    name: str
    promises: Promises


class Say(msgspec.Struct, frozen=True, tag=True):
    """A value about the round; without a round, about the life of the process."""

    name: str
    value: bytes
    round: Round | None = None


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a process: its identity, and all its statements."""

    rank: int
    token: int
    """The random number of this process, see `roster_of`."""
    job: JobStart
    born: int = 0
    """When it was started, by its own clock."""
    place: RoundPlace = RoundPlace()
    promises: dict[str, Promises] = {}
    """Promises in the round that it is in."""
    said: dict[str, bytes] = {}
    """Values by name, about the round that it is in."""
    facts: dict[str, bytes] = {}
    """Values by name, about the whole life of the process."""
    silent_s: float = 0.0
    """Seconds without a message after which it counts as lost; 0: never."""
    version: int = VERSION

    @property
    def round(self) -> Round | None:
        """The round that the process is in."""
        inside = self.place.phase is RoundPhase.IN
        return (self.place.number, self.place.roster) if inside else None

    @property
    def precedence(self) -> tuple[bool, int]:
        """The one with more stays, of two processes of a rank; of equal ones the newer connection.

        A new process counts most, whatever the clocks of two nodes say: it was started because the
        other one is lost.
        """
        return (False, self.born) if self.place.been else (True, 0)

    def with_statement(self, message: Move | Promise | Say) -> 'Hello':
        """All statements after one more; the same if it is about another round."""
        change = msgspec.structs.replace
        match message:
            case Move(place):
                return change(self, place=place, promises={}, said={})
            case Promise(about, name, promises) if about == self.round:
                return change(self, promises={**self.promises, name: promises})
            case Say(name, value, None):
                return change(self, facts={**self.facts, name: value})
            case Say(name, value, about) if about == self.round:
                return change(self, said={**self.said, name: value})
        return self


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Request for what other ranks have said, answered by `Answered` under the same number."""

    number: int
    name: str
    ranks: tuple[int, ...]


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The process ends, and is not missed."""


class Show(msgspec.Struct, frozen=True, tag=True):
    """First message of a viewer, answered by `Shown`."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Hello`."""


class Fenced(msgspec.Struct, frozen=True, tag=True):
    """The job goes on without this process, which must end."""

    why: str


class RoundOver(msgspec.Struct, frozen=True, tag=True):
    """This round and all before it are over."""

    number: int
    why: str


class RoundMet(msgspec.Struct, frozen=True, tag=True):
    """All ranks have joined the round."""

    number: int
    roster: int
    verdict: bytes


class Settled(msgspec.Struct, frozen=True, tag=True):
    """Agreement about the windows promised under a name."""

    round: Round
    name: str
    agreed: Agreed


class AllSaid(msgspec.Struct, frozen=True, tag=True):
    """All ranks of the round have said the name; `value` is what follows from their values."""

    round: Round
    name: str
    value: bytes


class Answered(msgspec.Struct, frozen=True, tag=True):
    """Values by rank; ranks that have not said the name are left out."""

    number: int
    values: dict[int, bytes]


class Shown(msgspec.Struct, frozen=True, tag=True):
    """What the coordinator knows, for people."""

    board: dict[str, object]


FromRank = Hello | Move | Promise | Say | Beat | Ask | Bye | Show
Conclusion = Fenced | RoundOver | RoundMet | Settled | AllSaid
ToRank = Welcome | Conclusion | Answered | Shown

FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)

_ENCODER = msgspec.msgpack.Encoder()
_LENGTH = struct.Struct('<I')


def framed(message: msgspec.Struct) -> bytes:
    encoded = _ENCODER.encode(message)
    return _LENGTH.pack(len(encoded)) + encoded


async def receive[Message](
    reader: asyncio.StreamReader,
    decoder: 'msgspec.msgpack.Decoder[Message]',
    limit: int = MOST_BYTES,
) -> Message:
    """Receive one message of at most `limit` bytes; never allocates more.

    Raises `ConnectionError` if the peer violates the protocol, `EOFError` if it is gone.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > limit:
        raise ConnectionError(f'message of {length} bytes exceeds {limit}')
    try:
        encoded = await reader.readexactly(length)
        return decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConnectionError(f'message cannot be understood: {error}') from error


async def carry_out[Result](
    steps: Steps[Result], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> Result:
    """Carry out one side of the greeting; raises as `receive` does."""
    answer = None
    try:
        while True:
            step, answer = steps.send(answer), None
            if isinstance(step, msgspec.msgpack.Decoder):
                answer = await receive(reader, step, MAX_GREETING_BYTES)
            else:
                writer.write(framed(step))
    except StopIteration as end:
        return cast(Result, end.value)
