# SPDX-License-Identifier: Apache-2.0
"""Coloured lines on a terminal."""

import os
from typing import TextIO

_GOOD, _BAD, _END = '\033[1;32m', '\033[1;33m', '\033[0m'


def highlighted(text: str, stream: TextIO, good: bool = True) -> str:
    """Add colour to a line if the stream is a terminal and `NO_COLOR` is not set."""
    try:
        shown = stream.isatty()
    except ValueError:  # closed
        shown = False
    if not shown or os.environ.get('NO_COLOR'):
        return text
    return f'{_GOOD if good else _BAD}{text}{_END}'
