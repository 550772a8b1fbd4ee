# SPDX-License-Identifier: Apache-2.0
import socket

import pytest

from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.protocol import MAX_MESSAGE_BYTES, Refused


def test_message_limit_holds_for_the_sender() -> None:
    left, right = _tcp_pair()
    with pytest.raises(ConnectionError, match='too large'):
        left.send(Refused('x' * MAX_MESSAGE_BYTES))
    left.close()
    right.close()


def _tcp_pair() -> tuple[Connection, Connection]:
    with socket.create_server(('127.0.0.1', 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        return Connection(left), Connection(listener.accept()[0])
