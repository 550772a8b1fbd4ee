# SPDX-License-Identifier: Apache-2.0
"""A loop that swallows the error that interrupts a step is left nevertheless."""

import pytest

from moevement_ext.job.loop_entry import LoopEntry


def interrupted(entry: LoopEntry, error: BaseException) -> None:
    with entry.step():
        raise error


def test_a_loop_that_returns_after_an_interrupted_step_raises_the_error() -> None:
    entry, error = LoopEntry(), RuntimeError('lost')

    def loop() -> str:
        with pytest.raises(RuntimeError):
            interrupted(entry, error)
        return 'done'

    with pytest.raises(RuntimeError) as raised:
        entry.enter(loop)
    assert raised.value is error
    assert entry.cut_off is None


def test_a_loop_that_goes_on_after_an_interrupted_step_is_left_at_the_next() -> None:
    entry, error = LoopEntry(), RuntimeError('lost')
    steps = []

    def loop() -> None:
        while True:
            try:
                interrupted(entry, error)
            except Exception:
                steps.append(1)

    with pytest.raises(RuntimeError, match='lost'):
        entry.enter(loop)
    assert steps == [1]


def test_a_loop_is_entered_again_after_it_was_left() -> None:
    entry = LoopEntry()
    with pytest.raises(KeyError):
        entry.enter(lambda: interrupted(entry, KeyError('lost')))

    def loop() -> int:
        with entry.step():
            return 3

    assert entry.enter(loop) == 3
