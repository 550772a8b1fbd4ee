# SPDX-License-Identifier: Apache-2.0
import pytest

from tools.lab.text import duration, size


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [
        (0, '0 s'), (0.0042, '4.2 ms'), (0.999, '999 ms'), (1, '1.0 s'), (59.94, '59.9 s'),
        (60, '1 min 00 s'), (185, '3 min 05 s'), (3600, '1 h 00 min'), (86399, '23 h 59 min'),
        (86400 * 5 + 3600 * 4, '5 d 04 h'),
    ],
)  # fmt: skip
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ('nbytes', 'text'),
    [
        (0, '0 bytes'), (1023, '1023 bytes'), (1024, '1 KiB'), (1536, '1.5 KiB'),
        (1023 * 2**20, '1023 MiB'), (2**30, '1 GiB'), (2**55, '32768 TiB'),
    ],
)  # fmt: skip
def test_sizes_are_formatted(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
