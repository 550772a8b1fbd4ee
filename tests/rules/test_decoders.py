# SPDX-License-Identifier: Apache-2.0
"""Decoders are made when a module is imported."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Types without fields, and the kinds of events, which one thread reads.
OTHERS = {'int', 'list[bytes]', 'kind'}


def test_no_struct_is_decoded_without_a_decoder_of_its_module() -> None:
    """msgspec 0.22 crashes if two threads decode the first object of a type at the same time."""
    found = {
        f'{path.relative_to(ROOT)}: {kind}'
        for folder in ('moevement_ext', 'megatron/moevement')
        for path in (ROOT / folder).rglob('*.py')
        for kind in re.findall(r'\.(?:decode|convert)\(.*type=([^)]+)\)', path.read_text('utf-8'))
        if kind not in OTHERS
    }
    assert not found
