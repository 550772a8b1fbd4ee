# SPDX-License-Identifier: Apache-2.0
"""A loop that swallows the error of an interrupted step is left nevertheless."""

import pytest

from moevement_ext.job.loop_entry import LoopEntry


def interrupted(entry: LoopEntry, error: BaseException) -> None:
    with entry.step():
        raise error


def test_enter_raises_the_swallowed_error_when_the_loop_returns() -> None:
    entry, error = LoopEntry(), RuntimeError('lost')

    def loop() -> str:
        with pytest.raises(RuntimeError):
            interrupted(entry, error)
        return 'done'

    with pytest.raises(RuntimeError) as raised:
        entry.enter(loop)
    assert raised.value is error
    assert entry.cut_off is None


def test_next_step_raises_the_swallowed_error() -> None:
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


def test_loop_that_fails_before_its_first_step_is_told_that_no_rank_is_connected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not at its first call, when all ranks are connected."""

    def loop() -> None:
        raise RuntimeError('a barrier of gloo')

    entry = LoopEntry()
    for said in (0, 1):
        with pytest.raises(RuntimeError):
            entry.enter(loop)
        assert len(caplog.messages) == said
        with pytest.raises(KeyError):
            entry.enter(lambda: interrupted(entry, KeyError('in a step')))
        assert len(caplog.messages) == said
    assert 'raised RuntimeError' in caplog.text and 'use torch.distributed only' in caplog.text
