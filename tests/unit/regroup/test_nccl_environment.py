# SPDX-License-Identifier: Apache-2.0
"""Processes survive the loss of a peer by settings that are made for them."""

import os

import pytest
import torch

from moevement_ext.errors import UserError
from moevement_ext.regroup import nccl_environment
from moevement_ext.regroup.nccl_environment import SETTINGS, prepare


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(os, 'environ', dict(os.environ))
    for name in (*SETTINGS, 'LOCAL_RANK'):
        os.environ.pop(name, None)
    monkeypatch.setattr(torch.distributed, 'is_nccl_available', lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, 'version', lambda: (2, 26, 2))
    return monkeypatch


def test_missing_variables_are_set(caplog: pytest.LogCaptureFixture) -> None:
    prepare()
    assert {name: os.environ[name] for name in SETTINGS} == {
        name: setting.value for name, setting in SETTINGS.items()
    }
    assert not caplog.records


ERROR_HANDLING = 'TORCH_NCCL_ASYNC_ERROR_HANDLING'


@pytest.mark.parametrize('name', sorted(SETTINGS.keys() - {ERROR_HANDLING}))
def test_users_variables_are_kept_and_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    os.environ[name] = '17'
    prepare()
    assert os.environ[name] == '17'
    (record,) = caplog.records
    said = record.getMessage()
    assert f'{name}=17: {SETTINGS[name].otherwise}' in said and '\n' not in said


def test_torch_never_ends_waits_itself() -> None:
    """Else they return any bytes before the failure is announced."""
    os.environ[ERROR_HANDLING] = '1'
    prepare()
    assert os.environ[ERROR_HANDLING] == '0'


def test_torch_creates_the_backend_that_can_reconnect() -> None:
    prepare()
    from torch.distributed import distributed_c10d as c10d

    if not hasattr(c10d, '_register_builtin_nccl_backend'):
        pytest.skip('this torch has one only')
    plugins = c10d.Backend._plugins
    before = plugins.get('NCCL')
    try:
        c10d._register_builtin_nccl_backend()
        assert plugins['NCCL'].creator_fn is c10d._create_nccl_process_group
    finally:
        plugins.pop('NCCL')
        if before is not None:
            plugins['NCCL'] = before


@pytest.mark.parametrize('version', [(2, 25, 1), (2, 26, 1), (2, 4)])
def test_old_nccl_is_refused(version: tuple[int, ...], environment: pytest.MonkeyPatch) -> None:
    environment.setattr(torch.cuda.nccl, 'version', lambda: version)
    with pytest.raises(UserError, match=r'needs 2\.26\.2 or newer') as refused:
        prepare()
    assert '\n' not in str(refused.value) and nccl_environment.BACKEND == 'nccl'


def test_without_nccl_torch_itself_complains(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(torch.distributed, 'is_nccl_available', lambda: False)
    environment.setattr(torch.cuda.nccl, 'version', lambda: 1 / 0)
    prepare()
