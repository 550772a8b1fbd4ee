# SPDX-License-Identifier: Apache-2.0
"""The program does what upstream's does with flags that only a program reads."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.moevement import pretrain_gpt  # noqa: E402


@pytest.mark.parametrize(('flag', 'fatal'), [('spiky_loss', False), ('nan_in_loss_and_grad', True)])
def test_losses_are_checked_as_asked(
    monkeypatch: pytest.MonkeyPatch, flag: str, fatal: bool
) -> None:
    checks: list[dict[str, Any]] = []

    class Machine:
        def validate_result(self, **check: Any) -> None:
            checks.append(check)

        def is_unexpectedly_large(self, loss: float, threshold: float, context: str) -> bool:
            return loss > threshold

    given = Namespace(check_for_spiky_loss=False, check_for_nan_in_loss_and_grad=False)
    setattr(given, f'check_for_{flag}', True)
    monkeypatch.setattr(pretrain_gpt, 'get_args', lambda: given)
    monkeypatch.setattr(pretrain_gpt, 'get_rerun_state_machine', Machine)
    wrong = torch.tensor([[float('nan') if fatal else 11.0]])
    pretrain_gpt.loss_func(torch.ones(1, 1), wrong)
    assert any(check['rejection_func'](check['result']) for check in checks)
    assert {check['fatal'] for check in checks} == {fatal}
