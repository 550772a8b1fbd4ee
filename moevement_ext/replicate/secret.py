# SPDX-License-Identifier: Apache-2.0
"""The shared secret of a job's ranks, its distribution, and the greeting of two that know it.

The secret is never in the store, which answers every client, nor in a command line or a log. This
package's launchers generate a secret and pass it to the workers in their environment, which other
users cannot read; under torchrun the user sets it (`VARIABLE`). Otherwise, if all ranks are on one
node, rank 0 generates one and keeps it there in a private file. No secret is sent over a process
group: a process that reaches the store can place itself between the group's ranks. So several nodes
without a given secret serve each other nothing.

The store contains a *mark*, which shows whether two ranks have the same secret, and a salt.

Two ranks greet each other before any other message: both prove, without sending it, that they have
the secret of this start of the job, by an HMAC over fresh random numbers of both sides, so that
recorded messages are useless. The server proves first, so that no client accepts a window from a
stranger.

    client: Hello(version, nonce) -> server: Challenge(nonce, proof) | Refused
    client: Response(proof) -> server: Ack | Refused

Later bytes are neither encrypted nor signed: the network between the hosts is trusted to deliver
them unchanged.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Generator, Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, Protocol, cast

import msgspec

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import HostMemoryError
from moevement_ext.logger import logger_of
from moevement_ext.memory import private_file
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.protocol import PROTOCOL_VERSION, Ack, Refused

logger = logger_of(__name__)

SECRET_BYTES = 32
MAX_GREETING_BYTES = 256

_Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class _Hello(msgspec.Struct, frozen=True, tag='Hello'):
    """First message of the client."""

    version: int
    nonce: _Bytes32


class _Challenge(msgspec.Struct, frozen=True, tag='Challenge'):
    """Answer of the server, which proves its secret and requests the client's proof."""

    nonce: _Bytes32
    proof: _Bytes32


class _Response(msgspec.Struct, frozen=True, tag='Response'):
    """Answer of the client, which proves its secret."""

    proof: _Bytes32


_HELLO = msgspec.msgpack.Decoder(_Hello)
_CHALLENGE = msgspec.msgpack.Decoder[_Challenge | Refused](_Challenge | Refused)
_RESPONSE = msgspec.msgpack.Decoder(_Response)
_VERDICT = msgspec.msgpack.Decoder[Ack | Refused](Ack | Refused)


def new_secret() -> bytes:
    """Random secret for one start of a job, 32 bytes."""
    return secrets.token_bytes(SECRET_BYTES)


type Steps[Result] = Generator[Any, Any, Result]
"""One side of the greeting, without its connection: yields a message to send, or the decoder of the
message that it is sent next."""


def admit(connection: Connection, secret: bytes) -> None:
    """Authenticate the client of a new connection. The caller sets the deadline.

    Raises `ConnectionError` if the client does not belong to this job; it is told why if possible.
    """
    _carry_out(admitting(secret), connection)


def introduce(connection: Connection, secret: bytes) -> str | None:
    """Greet and authenticate a server. The caller sets the deadline.

    Returns the server's reason to refuse this client; None after mutual authentication. Raises
    `ConnectionError` if the server does not belong to the job.
    """
    return _carry_out(introducing(secret), connection)


def _carry_out[Result](steps: Steps[Result], connection: Connection) -> Result:
    answer = None
    try:
        while True:
            step, answer = steps.send(answer), None
            if isinstance(step, msgspec.msgpack.Decoder):
                answer = connection.receive(step, MAX_GREETING_BYTES)
            else:
                connection.send(step)
    except StopIteration as end:
        return cast(Result, end.value)


def admitting(secret: bytes) -> Steps[None]:
    """The steps of `admit`."""
    hello = yield _HELLO
    if hello.version != PROTOCOL_VERSION:
        reason = f'protocol version {hello.version}, this holder speaks {PROTOCOL_VERSION}'
        yield Refused(reason)
        raise ConnectionError(reason)
    nonce = secrets.token_bytes(32)
    yield _Challenge(nonce, _proof(secret, b'server', hello.nonce, nonce))
    response = yield _RESPONSE
    if not hmac.compare_digest(response.proof, _proof(secret, b'client', hello.nonce, nonce)):
        yield Refused('this holder belongs to another job')
        raise ConnectionError('a client without the secret of the job')
    yield Ack()


def introducing(secret: bytes) -> Steps[str | None]:
    """The steps of `introduce`."""
    nonce = secrets.token_bytes(32)
    yield _Hello(PROTOCOL_VERSION, nonce)
    challenge = yield _CHALLENGE
    if isinstance(challenge, Refused):
        return challenge.reason
    expected = _proof(secret, b'server', nonce, challenge.nonce)
    if not hmac.compare_digest(challenge.proof, expected):
        raise ConnectionError(
            'it does not know the secret of this job: another job, or an earlier attempt of this '
            'one, listens there (check --sparse-ckpt-run-id), or another node without '
            'MOEVEMENT_SECRET'
        )
    yield _Response(_proof(secret, b'client', nonce, challenge.nonce))
    verdict = yield _VERDICT
    return verdict.reason if isinstance(verdict, Refused) else None


def _proof(secret: bytes, role: bytes, client: bytes, server: bytes) -> bytes:
    """Proof for one side; the role prevents a reflection to its sender."""
    return hmac.digest(secret, role + client + server, 'sha256')


VARIABLE = 'MOEVEMENT_SECRET'
"""Environment variable of workers with the secret."""
_LEAST_CHARACTERS = 16
_MARK_BYTES = 8
_FILE = 'secret'


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
        ConfigurationError: this rank does not have rank 0's secret.
        HostMemoryError: rank 0 cannot keep a secret on this node; on all ranks.
    """
    secret = given_in(os.environ)
    closed = closed_between_nodes() is not None
    if secret is None and not closed and rank == 0 and not exchange.joining:
        secret = _drawn(node)
    wanted = exchange('secrets', b'' if secret is None else mark(secret))[0]
    if closed and not wanted:
        return new_secret()  # admits no other process
    if not wanted and secret is None:
        raise HostMemoryError(f'rank 0 cannot keep the secret of the job below {node.root}')
    secret = secret or _kept(node)
    if secret is None or mark(secret) != wanted:
        raise ConfigurationError(
            f'the secret of rank 0 is neither in {VARIABLE} of rank {rank} nor in '
            f'{node.shared / _FILE}: give all nodes the same one (openssl rand -hex 32), or none.'
        )
    return secret


def closed_between_nodes() -> str | None:
    """Why windows are not served between nodes, with the remedy; None if they are, or on one node.

    By the environment of a worker. Without torchrun each rank counts as a node.
    """
    nodes = os.environ.get('GROUP_WORLD_SIZE') or os.environ.get('WORLD_SIZE', '1')
    if nodes == '1' or given_in(os.environ) is not None:
        return None
    return (
        f'{VARIABLE} is not set, so windows are not served between nodes: a failure restarts all '
        'workers, and a lost node loses its windows. Give all nodes the same one: openssl rand '
        '-hex 32'
    )


def marks_here() -> list[bytes]:
    """Mark of the secret given to this process, if there is one."""
    given = given_in(os.environ)
    return [] if given is None else [mark(given)]


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


class CoordinatorSecrets(NamedTuple):
    """The secret of the clients of the coordinator, by the process that keeps it."""

    of_launcher: bytes
    of_rank_0: bytes
    """Useless in another start of the job."""


def of_coordinator(secret: bytes | None, salt: bytes = b'') -> bytes:
    """Derive the secret of the clients of the coordinator, with a salt that all of them know.

    Nodes without a secret in common (None) agree about windows, which they do not serve each other,
    as about all else: every process that reaches their store can disturb it.
    """
    return of_attempt(secret or b'', b'coordinator' + salt)


def _kept(node: NodeStore) -> bytes | None:
    found = b''
    with suppress(HostMemoryError, OSError):
        private_file.check_directories(node.root, node.shared)
        with open(private_file.open_file(node.shared / _FILE, os.O_RDONLY), 'rb') as file:
            found = file.read(SECRET_BYTES + 1)
    return found if len(found) == SECRET_BYTES else None


def _drawn(node: NodeStore) -> bytes | None:
    """A new secret, kept for all processes on this node; None if it cannot be kept."""
    secret = new_secret()
    path = node.shared / f'{_FILE}-{os.getpid()}'
    try:
        private_file.make_directories(node.root, node.shared)
        with open(private_file.open_file(path, os.O_WRONLY | os.O_CREAT), 'wb') as file:
            file.write(secret)
        path.rename(node.shared / _FILE)
    except (HostMemoryError, OSError) as error:
        logger.warning('the secret of the job cannot be kept: %s', error)
        return None
    return secret
