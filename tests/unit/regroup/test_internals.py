# SPDX-License-Identifier: Apache-2.0
"""Parts of torch that are missing are refused by name; waits for other ranks are told apart."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import Backend, HashStore, ProcessGroup

from moevement_ext.regroup import internals, waits
from moevement_ext.regroup.process_groups import stand_in_for
from moevement_ext.regroup.waits import Waited


def test_missing_part_is_named() -> None:
    internals.check(internals.PARTS)
    parts = {'distributed.ProcessGroup': ('rank', 'levitate')}
    with pytest.raises(internals.UnsupportedTorchError, match='no distributed.ProcessGroup.levit'):
        internals.check(parts)
    with pytest.raises(internals.UnsupportedTorchError, match=internals.CHECKED_WITH):
        internals.check({'nowhere.at.all': ('x',)})


def test_missing_symbol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, '_RELEASE', '_ZN4c10d12ProcessGroup8levitateEv')
    with pytest.raises(internals.UnsupportedTorchError, match='release_resources'):
        internals.libtorch.__wrapped__()


class _Derived(ProcessGroup):
    """A group with a C++ class of its own: pybind11 makes the trampoline."""


def test_objects_of_another_class_are_refused() -> None:
    internals.address_of(ProcessGroup(HashStore(), 0, 1))
    with pytest.raises(internals.UnsupportedTorchError, match='_Derived'):
        internals.address_of(_Derived(0, 1))
    with pytest.raises(internals.UnsupportedTorchError, match='HashStore'):
        internals.address_of(HashStore())  # type: ignore[arg-type]


def test_address_of_another_object_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = internals.libtorch()
    monkeypatch.setattr(internals, 'libtorch', lambda: found._replace(vtable=found.vtable + 8))
    with pytest.raises(internals.UnsupportedTorchError, match='another C'):
        internals.address_of(ProcessGroup(HashStore(), 0, 1))


def test_fake_groups_stand_in_for_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, 'backend_capability', dict(Backend.backend_capability))
    stand_in_for('nccl')
    assert torch.distributed.distributed_c10d.BackendConfig('fake').get_device_backend_map() == {
        'cuda': 'fake'
    }


def test_waits_of_the_training_thread_count_for_the_rank_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = itertools.count(0.0)  # one passes between two looks at the clock
    monkeypatch.setattr(waits, 'time', SimpleNamespace(perf_counter=seconds.__next__))
    waited = Waited()
    waited.begin(on_gpu=False)
    with waited.waiting_for(3):
        waited.timed(int)
    waited.timed(int)
    other = threading.Thread(target=waited.timed, args=(int,))
    other.start()
    other.join()
    with pytest.raises(ZeroDivisionError), waited.waiting_for(3):
        waited.timed(lambda: 1 / 0)
    assert waited.take() == {'3': 2.0, 'group': 1.0}
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
        waited.timed(int)
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
