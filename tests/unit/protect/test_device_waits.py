# SPDX-License-Identifier: Apache-2.0
"""Waits of the training thread for the device are counted, and there are none that it can spare."""

import time
from types import SimpleNamespace

import pytest
import torch

from moevement_ext.events import EventLog
from moevement_ext.job.localized_mode import LocalizedMode
from moevement_ext.protect.statistics import CaptureStatistics
from moevement_ext.regroup.nccl import Nccl


class Stream:
    """A stream of a device that computes for as long as each wait is said to take."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.busy = True
        self.waits = 0

    def query(self) -> bool:
        return not self.busy

    def synchronize(self) -> None:
        self.waits += 1
        self.clock += 0.25
        self.busy = False


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(torch, 'cuda', SimpleNamespace(current_stream=lambda: stream))
    monkeypatch.setattr(time, 'perf_counter', lambda: stream.clock)
    return stream


def test_both_waits_of_an_iteration_are_counted(stream: Stream) -> None:
    nccl, statistics = Nccl(), CaptureStatistics(EventLog(None, 0))
    mode = object.__new__(LocalizedMode)
    mode.protection = SimpleNamespace(checkpointer=SimpleNamespace(statistics=statistics))
    mode._recovery = SimpleNamespace(updating=nccl.synchronize, committing=nccl.synchronize)
    mode._running = 0
    mode.updating()
    assert statistics.device_wait_s == 0.25 and stream.waits == 1
    stream.busy = True  # the update is queued
    with pytest.raises(AttributeError):  # the rest of a job is not there
        mode.stepped(skipped=False)
    assert statistics.device_wait_s == 0.5 and stream.waits == 2
    assert statistics.exposed_s == 0.0, 'the device computes meanwhile'


def test_a_device_that_has_done_all_is_not_waited_for(stream: Stream) -> None:
    stream.busy = False
    Nccl().synchronize()
    assert stream.waits == 0
