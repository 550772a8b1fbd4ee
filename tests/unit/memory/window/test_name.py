# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest

from moevement_ext.memory.window.name import History, Window, WindowName, drawn_history


def test_window_is_dense_at_its_last_slot() -> None:
    window = Window(WindowName(4, 'plan'), 3)
    assert (window.start, window.dense_at) == (4, 6)


def test_a_history_includes_its_windows_and_what_led_to_its_base() -> None:
    first = History(drawn_history())
    base, later = first.window(4, 'plan'), first.window(6, 'plan')
    second = first.after(base)
    third = second.after(second.window(5, 'plan'))
    assert second == first.after(base) and first.name < second.name < third.name
    assert second != first.after(later), 'another base, another history'
    assert (base.history, second.window(4, 'plan').history) == (first.name, second.name)
    assert first.includes(base) and first.includes(later)
    assert second.includes(base) and second.includes(first.window(2, 'plan'))
    assert not second.includes(later), 'abandoned when all stages went back'
    assert not third.includes(base), 'its own base is what it goes back to'
    assert not History(drawn_history()).includes(base)


def test_decoded_names_are_validated() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode((4, 'plan')), type=WindowName) == (
        WindowName(4, 'plan')
    )
    for foreign in ((-1, 'plan'), (4,), (4, 5), ('4', 'plan')):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(foreign), type=WindowName)
