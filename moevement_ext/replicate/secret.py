# SPDX-License-Identifier: Apache-2.0
"""The secret by which the ranks of a job recognise each other, and how each comes to know it.

It is never in the store where they meet, which answers everybody, nor in a command line or a log.
The launchers of this project draw one and hand it to the workers in their environment, which other
users cannot read; under torchrun the user may do so (`VARIABLE`). Without that rank 0 draws one and
gives it to the others over the process group, and each node keeps it in a file that is this user's
alone, for a process that takes the place of a lost one there. One on another node cannot know it
then, so that all start again (see `recover.verdict`).

What is in the store is a *mark*, which tells whether two have the same secret, and a salt.
"""

import hashlib
import hmac
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import HostMemoryError
from moevement_ext.memory import private
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.replicate.greeting import SECRET_BYTES, new_secret

logger = logging.getLogger(__name__)

VARIABLE = 'MOEVEMENT_SECRET'
"""In the environment of workers."""
_LEAST_CHARACTERS = 16
_MARK_BYTES = 8
_FILE = 'secret'


class UnknownSecretError(HostMemoryError):
    """This process takes a lost one's place and has nothing that the others would know it by."""


class _Marks(msgspec.Struct, frozen=True):
    """What a rank says of the secrets that it has."""

    given: bytes
    """That of the secret in its environment; empty: there is none."""
    drawn: bytes
    """That of one that it has drawn; the one of rank 0 counts, if none is given."""


class SecretExchange(Protocol):
    """That of `membership.exchange`."""

    joining: bool

    def __call__(self, name: str, own: bytes) -> list[bytes]:
        """What every rank gave; it is in the store as well."""

    @staticmethod
    def from_first(own: bytes, ranks: Sequence[int], group: None) -> bytes:
        """What the first of some ranks gives, over the process group alone."""


def variables() -> dict[str, str]:
    """A new secret, for the environment of all workers of a launch."""
    return {VARIABLE: new_secret().hex()}


def variables_of(secret: bytes) -> dict[str, str]:
    """The same of a secret that only the launchers of the job have, wherever they are."""
    return {VARIABLE: hmac.digest(secret, b'workers', 'sha256').hex()}


def agree(exchange: SecretExchange, node: NodeStore) -> bytes:
    """The secret of the job. Collective; by a process that joins alone.

    Args:
        exchange: with all ranks.
        node: memory of the run on this node.

    Raises:
        ConfigurationError: ranks have been given different ones, or only some have been.
        UnknownSecretError: the others know one that this process, which joins them, does not.
    """
    given, drawn = given_in(os.environ), new_secret()
    own = _Marks(b'' if given is None else mark(given), mark(drawn))
    decode = msgspec.msgpack.Decoder(_Marks).decode
    found = [decode(item) for item in exchange('secrets', msgspec.msgpack.encode(own))]
    if exchange.joining:
        return _known_by(found[0].given or found[0].drawn, given, node)
    _check_same([marks.given for marks in found])
    if given is not None:
        return given
    secret = exchange.from_first(drawn, range(len(found)), None)
    _keep(secret, node)
    return secret


def marks_here(node: NodeStore) -> list[bytes]:
    """Marks of the secrets by which a new process on this node may be known."""
    return [mark(secret) for secret in _here(given_in(os.environ), node)]


def given_in(environment: Mapping[str, str]) -> bytes | None:
    """The secret in an environment; None: there is none.

    Raises:
        ConfigurationError: it could be guessed.
    """
    text = environment.get(VARIABLE, '')
    if not text:
        return None
    if len(text) < _LEAST_CHARACTERS:
        raise ConfigurationError(
            f'{VARIABLE} has {len(text)} characters and could be guessed: give all nodes the same '
            f'random one, of {_LEAST_CHARACTERS} or more (openssl rand -hex 32).'
        )
    return hashlib.sha256(text.encode()).digest()


def mark(secret: bytes) -> bytes:
    """What may be known to everybody of a secret."""
    return hmac.digest(secret, b'mark', 'sha256')[:_MARK_BYTES]


def of_life(secret: bytes, salt: bytes) -> bytes:
    """The secret of one life of a job, which is of no use in another.

    Args:
        secret: of the job.
        salt: drawn for that life; it may be known to everybody.
    """
    return hmac.digest(secret, b'life' + salt, 'sha256')


def _check_same(given: list[bytes]) -> None:
    if len(set(given)) == 1:
        return
    lacking = [rank for rank, mark in enumerate(given) if not mark]
    if lacking:
        problem = f'is set for some ranks, but not for {_few(lacking)}'
    else:
        others = [rank for rank, mark in enumerate(given) if mark != given[0]]
        problem = f'of rank 0 is another than that of {_few(others)}'
    raise ConfigurationError(
        f'{VARIABLE} {problem}: give all nodes the same one (openssl rand -hex 32), or none.'
    )


def _few(ranks: Sequence[int]) -> str:
    named = ', '.join(map(str, ranks[:8]))
    return f'rank {named}' if len(ranks) == 1 else f'ranks {named}{", ..." * (len(ranks) > 8)}'


def _known_by(wanted: bytes, given: bytes | None, node: NodeStore) -> bytes:
    for secret in _here(given, node):
        if hmac.compare_digest(mark(secret), wanted):
            return secret
    raise UnknownSecretError(
        f'the others know a secret of the job that is neither in {VARIABLE} nor in '
        f'{node.shared / _FILE}'
    )


def _here(given: bytes | None, node: NodeStore) -> list[bytes]:
    kept = _kept(node)
    return [secret for secret in (given, kept) if secret is not None]


def _kept(node: NodeStore) -> bytes | None:
    with suppress(HostMemoryError, OSError):
        private.check_directories(node.root, node.shared)
        with open(private.open_file(node.shared / _FILE, os.O_RDONLY), 'rb') as file:
            found = file.read(SECRET_BYTES + 1)
        return found if len(found) == SECRET_BYTES else None
    return None


def _keep(secret: bytes, node: NodeStore) -> None:
    """For a replacement on this node; all ranks of it write the same."""
    path = node.shared / f'{_FILE}-{os.getpid()}'
    try:
        private.make_directories(node.root, node.shared)
        with open(private.open_file(path, os.O_WRONLY | os.O_CREAT), 'wb') as file:
            file.write(secret)
        path.rename(node.shared / _FILE)
    except (HostMemoryError, OSError) as error:
        logger.warning(
            'sparse checkpointing: the secret of the job cannot be kept on this node, so that a '
            'worker which is replaced here starts the whole job again: %s',
            error,
        )
