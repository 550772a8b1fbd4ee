# SPDX-License-Identifier: Apache-2.0
"""Parts of torch that are missing or different are refused by name."""

import pytest
import torch
from torch.distributed import Backend, HashStore, ProcessGroup

from moevement_ext.regroup import internals
from moevement_ext.regroup.process_groups import stand_in_for


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
