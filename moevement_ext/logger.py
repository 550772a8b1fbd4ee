# SPDX-License-Identifier: Apache-2.0
"""Loggers of the engine and the adapter, whose messages name the product, and coloured lines."""

import logging
import os
from typing import TextIO

_GOOD, _BAD, _END = '\033[1;32m', '\033[1;33m', '\033[0m'


def logger_of(module: str) -> logging.Logger:
    """Logger of a module, by its `__name__`; the program's own logging decides the rest."""
    logger = logging.getLogger(module)
    logger.addFilter(_prefixed)
    return logger


def _prefixed(record: logging.LogRecord) -> bool:
    record.msg = f'sparse checkpointing: {record.msg}'
    return True


def highlighted(text: str, stream: TextIO, good: bool = True) -> str:
    """Add colour to a line if the stream is a terminal and `NO_COLOR` is not set."""
    try:
        shown = stream.isatty()
    except ValueError:  # closed
        shown = False
    if not shown or os.environ.get('NO_COLOR'):
        return text
    return f'{_GOOD if good else _BAD}{text}{_END}'
