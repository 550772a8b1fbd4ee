# SPDX-License-Identifier: Apache-2.0
"""The settings of a machine without a GPU are in one place and no larger than needed."""

import os

import pytest

from megatron.moevement.checking import parser
from megatron.moevement.offline import run_flags
from megatron.moevement.seams import cpu_device, without_gpu


def test_export_uses_the_same_cpu_settings() -> None:
    defaults, without = run_flags.without_gpu_settings(parser()), without_gpu.FLAGS.split()
    changing = {
        action.dest for action in parser()._actions if {*action.option_strings} & {*without}
    }
    assert defaults.keys() == changing and len(changing) == 9
    assert defaults['distributed_backend'] == 'gloo' and not defaults['bias_swiglu_fusion']


@pytest.mark.parametrize('users', [None, '0'])
def test_environment_value_of_the_user_takes_precedence(
    users: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in without_gpu.VARIABLES:
        monkeypatch.delenv(name, raising=False)
        if users is not None:
            monkeypatch.setenv(name, users)
    for name in ('_redirect_devices', '_redirect_cuda_module', '_redirect_streams'):
        monkeypatch.setattr(cpu_device, name, lambda: None)
    monkeypatch.setattr(cpu_device.quiet, 'on_a_cpu', lambda: None)
    monkeypatch.setattr(cpu_device, 'hide_transformer_engine', lambda: None)
    cpu_device.install.__wrapped__()
    for name, value in without_gpu.VARIABLES.items():
        assert os.environ[name] == (value if users is None else users)
