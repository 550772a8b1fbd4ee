# SPDX-License-Identifier: Apache-2.0
"""Surplus ranks: the layout has no place for them, so they only serve windows of their nodes.

A launcher may start more ranks than the largest layout can use. These ranks do not train: they
serve the windows in the memory of their nodes, and end with the job (`job/surplus_rank.py`).

Rank 0 sends them numbered messages through the job's store. Keys, all with the prefix
`sparse-ckpt-surplus`: `messages` (the number of messages), `message/<n>`, `answered/<n>/<rank>`,
and the answers, in the form of `membership.exchange`. Each answer names its message, so that
answers to an earlier run attempt are ignored.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from torch.distributed import DistError, PrefixStore, Store, TCPStore

from moevement_ext.logger import logger_of
from moevement_ext.membership.exchange import left_by
from moevement_ext.membership.rank import Rank
from moevement_ext.recover.reshard.stock import Stock
from moevement_ext.replicate.client import ReplicaClient
from moevement_ext.replicate.secret import given_in, new_secret, of_attempt

logger = logger_of(__name__)

_SURPLUS = 'MOEVEMENT_SURPLUS_RANKS'
_TO_CONNECT = timedelta(seconds=60)
_TO_ANSWER = timedelta(minutes=5)
MESSAGES = 'messages'


class Call(msgspec.Struct, frozen=True, tag=True):
    """Training ranks search for windows."""

    salt: bytes
    """Random, public salt of the secret of the windows' servers."""
    hosts: list[str]
    """Machines of those ranks."""


class LetGo(msgspec.Struct, frozen=True, tag=True):
    """Windows of other layouts are worthless now."""


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """The job ends."""

    code: int
    """Exit status."""
    freed: bool
    """Windows of other layouts are worthless, too."""


Message = Call | LetGo | Dismissed


class SurplusAnswer(msgspec.Struct, frozen=True):
    """The parts that one surplus rank can read, and its server's address."""

    stock: Stock
    host: str
    port: int


_ANSWER = msgspec.msgpack.Decoder(SurplusAnswer)


_ANSWERS = msgspec.msgpack.Decoder(tuple[bytes, list[SurplusAnswer]])


@dataclass(frozen=True)
class Answers:
    """Answers of the surplus ranks that responded."""

    answers: Sequence[SurplusAnswer]
    secret: bytes

    @property
    def stocks(self) -> list[Stock]:
        return [answer.stock for answer in self.answers]

    def client(self, index: int) -> ReplicaClient:
        """A client, not yet connected, of the rank at `index` in `stocks`."""
        answer = self.answers[index]
        return ReplicaClient((answer.host, answer.port), self.secret)


NO_ANSWERS = Answers([], b'')


def set_aside(ranks: int) -> None:
    """Exclude all ranks that the launcher has started, except the first `ranks`, from training.

    The only place that overwrites a variable of the launcher. Called once, before upstream or
    the engine reads `WORLD_SIZE`.
    """
    started = int(os.environ.get('WORLD_SIZE', '1'))
    if ranks < started:
        os.environ |= {'WORLD_SIZE': str(ranks), _SURPLUS: str(started - ranks)}


def is_surplus() -> bool:
    return int(os.environ.get(_SURPLUS, '0')) > 0 and own_rank() >= _training()


def own_rank() -> int:
    return int(os.environ.get('RANK', '0'))


def started(training: int) -> int:
    """Ranks that the launcher has started, of which `training` train."""
    return training + len(_numbers())


def _training() -> int:
    return int(os.environ['WORLD_SIZE'])


def _numbers() -> range:
    count = int(os.environ.get(_SURPLUS, '0'))
    return range(_training(), _training() + count) if count else range(0)


def meeting_place(timeout: timedelta) -> Store:
    """Connect to the job's store, with the prefix of this module's keys; `DistError`: timeout."""
    host, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
    store = TCPStore(host, port, is_master=False, timeout=timeout)
    return PrefixStore('sparse-ckpt-surplus', store)


def ask(rank: Rank, hosts: set[str]) -> Answers:
    """Ask surplus ranks for the parts of other layouts that they can read.

    Collective over the training ranks; `hosts` are the machines of these ranks.
    """
    if not _numbers():
        return NO_ANSWERS
    secret, salt = given_in(os.environ), new_secret()
    found = _answers(Call(salt, sorted(hosts))) if rank.number == 0 else []
    encoded = rank.exchange('surplus', msgspec.msgpack.encode((salt, found)))[0]
    salt, answers = _ANSWERS.decode(encoded)
    if secret is None:  # all ranks are on this node, and can read its windows
        return NO_ANSWERS
    return Answers(answers, of_attempt(secret, salt))


def _answers(call: Call) -> list[SurplusAnswer]:
    try:
        store = meeting_place(_TO_CONNECT)
        number = _say(store, call)
        with suppress(DistError):  # what some have left still counts
            store.wait([answered(number, one) for one in _numbers()], _TO_ANSWER)
        left = [left_by(store, answers_to(number), one) for one in _numbers()]
    except DistError as error:
        logger.warning('surplus ranks cannot be asked for windows: %s', error)
        return []
    silent = [one for one, answer in zip(_numbers(), left, strict=True) if answer is None]
    if silent:
        logger.warning('surplus ranks %s did not say which windows they see', silent)
    return [_ANSWER.decode(answer) for answer in left if answer is not None]


def let_go() -> None:
    """Tell surplus ranks to delete the windows of other layouts. Any thread of rank 0."""
    _tell(LetGo())


def dismiss(code: int, freed: bool) -> None:
    """Send `Dismissed` to surplus ranks. Rank 0, while the job's store exists."""
    _tell(Dismissed(code, freed))


def _tell(message: Message) -> None:
    if not _numbers():
        return
    try:
        _say(meeting_place(_TO_CONNECT), message)
    except DistError as error:  # the launcher has gone, and ends them
        logger.warning('a message did not reach the surplus ranks: %s', error)


def _say(store: Store, message: Message) -> int:
    number = store.add(MESSAGES, 1)
    store.set(key_of(number), msgspec.msgpack.encode(message))  # type: ignore[arg-type]
    store.get(key_of(number))  # it has arrived: this process may be the store's
    return number


def key_of(number: int) -> str:
    return f'message/{number}'


def answered(number: int, rank: int) -> str:
    """Key that is set once a rank has answered a message."""
    return f'answered/{number}/{rank}'


def answers_to(number: int) -> str:
    """Name of the answers to a message, for `membership.exchange.leave`."""
    return f'surplus/{number}'
