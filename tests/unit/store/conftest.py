# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.unit.store.processes import Leader, Server


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as made:
        yield made


@pytest.fixture
def leader(server: Server) -> Iterator[Leader]:
    """Of one node."""
    with closing(Leader(server.port)) as made:
        yield made
