# SPDX-License-Identifier: Apache-2.0
"""What is refused, and in which words: the rows of `tests/unit/messages.toml`, one table a test."""

import tomllib
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / 'unit' / 'messages.toml'
_TABLES: dict[str, list[Any]] = tomllib.loads(_FILE.read_text('utf-8'))


def messages(table: str) -> list[Any]:
    """Parameters of a test."""
    return _TABLES[table]
