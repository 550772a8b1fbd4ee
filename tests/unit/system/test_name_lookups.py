# SPDX-License-Identifier: Apache-2.0
"""The C library's resolver gets the options, unless the user has set options."""

import ctypes
import importlib
import os
from contextlib import suppress

import pytest

from moevement_ext.system.process_setup import ask_again_soon


@pytest.mark.parametrize(
    ('given', 'expected'), [(None, 'timeout:1 attempts:5'), ('ndots:1', 'ndots:1')]
)
def test_resolver_options_of_the_user_are_kept(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('RES_OPTIONS', given or '')
    if given is None:
        monkeypatch.delenv('RES_OPTIONS')
    ask_again_soon()
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b'RES_OPTIONS') == expected.encode()


@pytest.mark.parametrize(
    'program',
    [
        'moevement_ext.launch.command_line',
        'moevement_ext.launch.slurm',
        'moevement_ext.store.__main__',
        'moevement_ext.launch.torchrun',
    ],
)
def test_launchers_set_the_resolver_options(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('RES_OPTIONS', '')
    monkeypatch.delenv('RES_OPTIONS')
    with suppress(SystemExit):  # torch's agent does not exit with SystemExit
        importlib.import_module(program).main(['--help'])
    assert os.environ['RES_OPTIONS'] == 'timeout:1 attempts:5'
