# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moevement_ext.memory.window.slot import SlotContext, decode_context

NAMES = st.lists(st.text(max_size=20), max_size=5)


@given(full=NAMES, light=NAMES, state=st.binary(max_size=100))
def test_what_is_encoded_is_decoded(full: list[str], light: list[str], state: bytes) -> None:
    context = SlotContext(full, light, state)
    assert decode_context(msgspec.msgpack.encode(context)) == context


@pytest.mark.parametrize('garbage', [b'', b'\x80', msgspec.msgpack.encode({'full': 1})])
def test_anything_else_is_refused(garbage: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_context(garbage)
