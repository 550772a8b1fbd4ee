# SPDX-License-Identifier: Apache-2.0
"""The probe of the capture path, without a GPU."""

from pathlib import Path

import pytest
import torch

from tests.gpu.jobs.copy_probe import Sizes, Stage, Window, busy
from tools.lab.errors import LabError

CPU = torch.device('cpu')
SMALL = Sizes(2**20, 64, 32, 64, 0.01, windows=2, small_calls=7)


@pytest.fixture(scope='module')
def stage() -> Stage:
    return Stage(CPU, SMALL)


def window_of(stage: Stage, shm: Path, share: float = 100.0) -> Window:
    """One in each of whose iterations so much of the state can be captured, but for a reserve."""
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in stage.tensors)
    plan = stage.plan(share * nbytes, 1.0, None)
    return Window(shm / 'w', stage.operators, plan)


def test_several_slots_hide_a_copy_and_hold_their_iterations(stage: Stage, shm: Path) -> None:
    window = window_of(stage, shm, share=0.75)
    assert window.slots > 1
    assert busy(CPU, stage, window, 1)['identical']
    assert window.contents_are(range(window.slots))
    assert not window.contents_are([slot + 1 for slot in range(window.slots)])


def test_a_failed_capture_is_an_error(shm: Path) -> None:
    stage = Stage(CPU, SMALL)
    window = window_of(stage, shm)
    stage.tensors[0].resize_(3)  # its place in the file has another size
    with pytest.raises(LabError, match='a capture failed'):
        busy(CPU, stage, window, 1)
