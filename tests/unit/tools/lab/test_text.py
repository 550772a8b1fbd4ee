# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable

import pytest

from tools.lab.tables import duration, size


@pytest.mark.parametrize(
    ('form', 'value', 'text'),
    [
        (duration, 0, '0 s'), (duration, 0.0042, '4.2 ms'), (duration, 0.999, '999 ms'),
        (duration, 59.94, '59.9 s'), (duration, 185, '3 min 05 s'), (duration, 3600, '1 h 00 min'),
        (duration, 86399, '23 h 59 min'), (duration, 86400 * 5 + 3600 * 4, '5 d 04 h'),
        (size, 1023, '1023 bytes'), (size, 1536, '1.5 KiB'), (size, 1023 * 2**20, '1023 MiB'),
        (size, 2**30, '1 GiB'), (size, 2**55, '32768 TiB'),
    ],
)  # fmt: skip
def test_figures_are_formatted(form: Callable[[float], str], value: float, text: str) -> None:
    assert form(value) == text
