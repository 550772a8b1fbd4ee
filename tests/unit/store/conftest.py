# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.unit.store.processes import Server


@pytest.fixture
def server() -> Iterator[Server]:
    with closing(Server()) as made:
        yield made
