# SPDX-License-Identifier: Apache-2.0
"""The probe of the capture path, without a GPU."""

from pathlib import Path

import torch

from tests.gpu.jobs.copy_probe import Sizes, Stage, Window, busy

CPU = torch.device('cpu')
SMALL = Sizes(2**20, 64, 32, 64, 0.01, windows=2, small_calls=7)


def test_several_slots_hide_a_copy_and_hold_their_iterations(shm: Path) -> None:
    stage = Stage(CPU, SMALL)
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in stage.tensors)
    window = Window(shm / 'w', stage.operators, stage.plan(0.75 * nbytes, 1.0, None))
    assert window.slots > 1
    assert busy(CPU, stage, window, 1)['identical']
    assert window.contents_are(range(window.slots))
    assert not window.contents_are([slot + 1 for slot in range(window.slots)])
