# SPDX-License-Identifier: Apache-2.0
"""Mutual authentication of two ranks of one job, before any other message.

Both sides prove, without sending it, that they have the secret of this start of the job: an HMAC
over fresh random numbers of both sides, so that recorded messages are useless. The server proves
first, so that no client accepts a window from a stranger.

    client: Hello(version, nonce) -> server: Challenge(nonce, proof) | Refused
    client: Response(proof) -> server: Ack | Refused

Later bytes are neither encrypted nor signed: the network between the hosts is trusted to deliver
them unchanged.
"""

import hmac
import secrets
from typing import Annotated

import msgspec

from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.protocol import PROTOCOL_VERSION, Ack, Refused

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


def admit(connection: Connection, secret: bytes) -> None:
    """Authenticate the client of a new connection. The caller sets the deadline.

    Raises `ConnectionError` if the client does not belong to this job; it is told why if possible.
    """
    hello = connection.receive(_HELLO, MAX_GREETING_BYTES)
    if hello.version != PROTOCOL_VERSION:
        reason = f'protocol version {hello.version}, this holder speaks {PROTOCOL_VERSION}'
        connection.send(Refused(reason))
        raise ConnectionError(reason)
    nonce = secrets.token_bytes(32)
    connection.send(_Challenge(nonce, _proof(secret, b'server', hello.nonce, nonce)))
    response = connection.receive(_RESPONSE, MAX_GREETING_BYTES)
    if not hmac.compare_digest(response.proof, _proof(secret, b'client', hello.nonce, nonce)):
        connection.send(Refused('this holder belongs to another job'))
        raise ConnectionError('a client without the secret of the job')
    connection.send(Ack())


def introduce(connection: Connection, secret: bytes) -> str | None:
    """Greet and authenticate a server. The caller sets the deadline.

    Returns the server's reason to refuse this client; None after mutual authentication. Raises
    `ConnectionError` if the server does not belong to the job.
    """
    nonce = secrets.token_bytes(32)
    connection.send(_Hello(PROTOCOL_VERSION, nonce))
    challenge = connection.receive(_CHALLENGE, MAX_GREETING_BYTES)
    if isinstance(challenge, Refused):
        return challenge.reason
    expected = _proof(secret, b'server', nonce, challenge.nonce)
    if not hmac.compare_digest(challenge.proof, expected):
        raise ConnectionError(
            'it does not know the secret of this job: another job, or an earlier attempt of this '
            'one, listens there (check --sparse-ckpt-run-id), or another node without '
            'MOEVEMENT_SECRET'
        )
    connection.send(_Response(_proof(secret, b'client', nonce, challenge.nonce)))
    verdict = connection.receive(_VERDICT, MAX_GREETING_BYTES)
    return verdict.reason if isinstance(verdict, Refused) else None


def _proof(secret: bytes, role: bytes, client: bytes, server: bytes) -> bytes:
    """Proof for one side; the role prevents a reflection to its sender."""
    return hmac.digest(secret, role + client + server, 'sha256')
