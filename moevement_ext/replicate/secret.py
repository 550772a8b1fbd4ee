# SPDX-License-Identifier: Apache-2.0
"""The shared secret of a job's ranks, and its distribution.

The secret is never in the store, which answers every client, nor in a command line or a log. This
package's launchers generate a secret and pass it to the workers in their environment, which other
users cannot read; under torchrun the user sets it (`VARIABLE`). Otherwise, if all ranks are on one
node, rank 0 generates one and keeps it there in a private file. No secret is sent over a process
group: a process that reaches the store can place itself between the group's ranks. So several nodes
without a given secret serve each other nothing.

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
    """Mark of the secret that this rank has generated and kept; empty without one."""


class _SecretExchange(Protocol):
    """Interface of `membership.exchange`."""

    joining: bool

    def __call__(self, name: str, own: bytes) -> list[bytes]:
        """All-gather over all ranks; the values are also in the store."""


def variables() -> dict[str, str]:
    """Environment variable with a new secret, for all workers of a launch."""
    return {VARIABLE: new_secret().hex()}


def variables_of(secret: bytes) -> dict[str, str]:
    """Environment variable with a secret derived from the launchers' secret."""
    return {VARIABLE: hmac.digest(secret, b'workers', 'sha256').hex()}


def agree(exchange: _SecretExchange, node: NodeStore, rank: int) -> bytes:
    """Agree on the secret of the job. Collective, except in a joining process.

    Raises:
        ConfigurationError: ranks have different secrets, or only some ranks have one.
        UnknownSecretError: this process does not have the job's secret.
        HostMemoryError: rank 0 cannot keep a secret on this node; on all ranks.
    """
    given = given_in(os.environ)
    draws = given is None and rank == 0 and not exchange.joining
    own = _Marks(b'' if given is None else mark(given), _drawn(node) if draws else b'')
    decode = msgspec.msgpack.Decoder(_Marks).decode
    found = [decode(item) for item in exchange('secrets', msgspec.msgpack.encode(own))]
    if not exchange.joining:
        _check_same([marks.given for marks in found])
        if closed_between_nodes() is not None:
            return new_secret()  # admits no other process
    return _known_by(found[0].given or found[0].drawn, given, node)


def closed_between_nodes() -> str | None:
    """Why windows are not served between nodes, with the remedy; None if they are, or on one node.

    By the environment of a worker. Without torchrun's variables, each rank counts as a node.
    """
    here, ranks = (int(os.environ.get(name, '1')) for name in ('LOCAL_WORLD_SIZE', 'WORLD_SIZE'))
    if here >= ranks or given_in(os.environ) is not None:
        return None
    return (
        f'{VARIABLE} is not set, so windows are not served between nodes: a failure restarts all '
        'workers, and a lost node loses its windows. Give all nodes the same one: openssl rand '
        '-hex 32'
    )


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
    if not wanted:
        raise HostMemoryError(f'rank 0 cannot keep the secret of the job below {node.root}')
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


def _drawn(node: NodeStore) -> bytes:
    """Mark of a new secret, kept for all processes on this node; empty if it cannot be kept."""
    secret = new_secret()
    path = node.shared / f'{_FILE}-{os.getpid()}'
    try:
        private.make_directories(node.root, node.shared)
        with open(private.open_file(path, os.O_WRONLY | os.O_CREAT), 'wb') as file:
            file.write(secret)
        path.rename(node.shared / _FILE)
    except (HostMemoryError, OSError) as error:
        logger.warning('sparse checkpointing: the secret of the job cannot be kept: %s', error)
        return b''
    return mark(secret)
