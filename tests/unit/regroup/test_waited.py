# SPDX-License-Identifier: Apache-2.0
"""What counts as a wait for another rank: by the clock of a thread, or of a device."""

import threading
import time

import pytest
import torch

from moevement_ext.regroup.waits import Waited


def test_waits_of_the_training_thread_count_for_the_rank_waited_for() -> None:
    waited = Waited()
    waited.begin(on_gpu=False)
    with waited.waiting_for(3):
        waited.timed(lambda: time.sleep(0.05))
    waited.timed(lambda: time.sleep(0.02))
    other = threading.Thread(target=lambda: waited.timed(lambda: time.sleep(0.02)))
    other.start()
    other.join()
    with pytest.raises(ZeroDivisionError), waited.waiting_for(3):
        waited.timed(lambda: 1 / 0)
    taken = waited.take()
    assert taken.keys() == {'3', 'group'}
    assert taken['3'] >= 0.05 and 0.02 <= taken['group'] < 0.04
    assert waited.take() == {}


class Event:
    """Passed by the device when a test says so."""

    passed: list['Event'] = []
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1
        self.at = Event.made

    def record(self) -> None: ...

    def query(self) -> bool:
        return self in Event.passed

    def elapsed_time(self, end: 'Event') -> float:
        assert self.query() and end.query()
        return 1000.0 * (end.at - self.at)


def test_waits_of_a_stream_count_once_the_device_has_passed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread itself does not wait for them, and a recorded graph has no times."""
    capturing = False
    monkeypatch.setattr(torch.cuda, 'Event', Event)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: capturing)
    waited = Waited()
    waited.begin(on_gpu=True)
    with waited.waiting_for(2):
        waited.timed(lambda: time.sleep(0.01))
    with waited.waiting_for(None):
        pass
    capturing = True
    with waited.waiting_for(None):
        pass
    (_, *first), second = waited._passing
    assert waited.take() == {}
    Event.passed += first
    assert waited.take() == {'2': 1.0}
    Event.passed += second[1:]
    assert waited.take() == {'group': 1.0}
