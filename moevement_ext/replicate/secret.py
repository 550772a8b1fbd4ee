# SPDX-License-Identifier: Apache-2.0
"""The shared secret of a job's ranks, and its distribution.

The secret is never in the store, which answers every client, nor in a command line or a log. This
package's launchers generate a secret and pass it to the workers in their environment, which other
users cannot read; under torchrun the user may set it (`VARIABLE`). Otherwise rank 0 generates one
and sends it to the other ranks over the process group. Each node then keeps the secret in a private
file, for replacement processes on this node. A replacement on another node cannot obtain it; then
all workers restart (see `recover.verdict`).

The store contains a *mark*, which shows whether two ranks have the same secret, and a salt.
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
"""Environment variable of workers with the secret."""
_LEAST_CHARACTERS = 16
_MARK_BYTES = 8
_FILE = 'secret'


class UnknownSecretError(HostMemoryError):
    """This replacement process does not have the other ranks' secret."""


class _Marks(msgspec.Struct, frozen=True):
    """Marks of the secrets of a rank."""

    given: bytes
    """Mark of the secret in its environment; empty without one."""
    drawn: bytes
    """Mark of a generated secret; rank 0's counts if none is given."""


class _SecretExchange(Protocol):
    """Interface of `membership.exchange`."""

    joining: bool

    def __call__(self, name: str, own: bytes) -> list[bytes]:
        """All-gather over all ranks; the values are also in the store."""

    @staticmethod
    def from_first(own: bytes, ranks: Sequence[int], group: None) -> bytes:
        """Broadcast from the first of some ranks, over the process group only."""


def variables() -> dict[str, str]:
    """Environment variable with a new secret, for all workers of a launch."""
    return {VARIABLE: new_secret().hex()}


def variables_of(secret: bytes) -> dict[str, str]:
    """Environment variable with a secret derived from the launchers' secret."""
    return {VARIABLE: hmac.digest(secret, b'workers', 'sha256').hex()}


def agree(exchange: _SecretExchange, node: NodeStore) -> bytes:
    """Agree on the secret of the job. Collective, except in a joining process.

    Raises:
        ConfigurationError: ranks have different secrets, or only some ranks have one.
        UnknownSecretError: this joining process does not have the job's secret.
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
    """Marks of the secrets available to a new process on this node."""
    return [mark(secret) for secret in _here(given_in(os.environ), node)]


def given_in(environment: Mapping[str, str]) -> bytes | None:
    """The secret in an environment, or None; `ConfigurationError` if it is too short."""
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
    return hmac.digest(secret, b'mark', 'sha256')[:_MARK_BYTES]


def of_attempt(secret: bytes, salt: bytes) -> bytes:
    """Derive the secret of one start of a job, useless in another, from the start's public salt."""
    return hmac.digest(secret, b'attempt' + salt, 'sha256')


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
    """Save the secret for a replacement on this node; all its ranks write the same value."""
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
