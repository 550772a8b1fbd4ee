# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest

from moevement_ext.memory.window.name import Window, WindowName


def test_window_is_dense_at_its_last_slot() -> None:
    window = Window(WindowName(4, 'plan'), 3)
    assert (window.start, window.dense_at) == (4, 6)


def test_decoded_names_are_validated() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode((4, 'plan')), type=WindowName) == (
        WindowName(4, 'plan')
    )
    for foreign in ((-1, 'plan'), (4,), (4, 5), ('4', 'plan')):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(foreign), type=WindowName)
