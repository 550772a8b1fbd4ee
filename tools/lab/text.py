# SPDX-License-Identifier: Apache-2.0
"""Figures formatted for people."""

import math
import re
from datetime import datetime

_UNITS = ('KiB', 'MiB', 'GiB', 'TiB')


def clock(time: float) -> str:
    """Format seconds since the epoch as local time, without the year."""
    return datetime.fromtimestamp(time).strftime('%m-%d %H:%M:%S')


def duration(seconds: float) -> str:
    """Format a duration: `3 ms`, `4.2 s`, `3 min 05 s`, `2 h 07 min`, `5 d 04 h`."""
    if seconds < 1:
        return f'{1000 * seconds:.3g} ms' if seconds else '0 s'
    if seconds < 60:
        return f'{seconds:.1f} s'
    whole = round(seconds)
    if whole < 3600:
        return f'{whole // 60} min {whole % 60:02} s'
    if whole < 86400:
        return f'{whole // 3600} h {whole % 3600 // 60:02} min'
    return f'{whole // 86400} d {whole % 86400 // 3600:02} h'


def loss(value: float | None) -> str:
    """Format a loss as in the log; None: it is not finite."""
    return 'not finite' if value is None else f'{value:.4f}'


def tick(seconds: float) -> str:
    """Format a round duration for an axis: `5 min`, `1.5 h`."""
    if seconds < 1:
        return f'{1000 * seconds:.3g} ms' if seconds else '0'
    units = ((86400, 'd'), (3600, 'h'), (60, 'min'), (1, 's'))
    unit, name = next(one for one in units if seconds >= one[0])
    return f'{seconds / unit:.3g} {name}'


def size(nbytes: float) -> str:
    if nbytes < 1024:
        return f'{nbytes:.0f} bytes'
    power = min(int(math.log(nbytes, 1024)), len(_UNITS))
    value = nbytes / 1024**power
    return (
        f'{value:.0f} {_UNITS[power - 1]}' if value >= 100 else f'{value:.3g} {_UNITS[power - 1]}'
    )


def readable(reason: str) -> str:
    """A survivor's reason, without gloo's source location and advice."""
    text = re.sub(r'\[[^\]]*\.(cc|h):\d+\]\s*', '', reason)
    text = re.sub(r'\s*GLHF!.*', '', text, flags=re.DOTALL)
    return ''.join(letter for letter in text if letter.isprintable() and ord(letter) < 0xE000)
