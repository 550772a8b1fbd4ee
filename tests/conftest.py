# SPDX-License-Identifier: Apache-2.0
"""Tests marked `thorough` run with `--thorough`, or when they are named on the command line.

Those that need a GPU or Transformer Engine run by themselves: all others train on the CPU, without
either, wherever they run.
"""

import os
from pathlib import Path

import pytest

from megatron.moevement.seams import cpu_device
from moevement_ext.process.name_lookups import ask_again_soon

BY_THEMSELVES = [Path(__file__).resolve().parent / name for name in ('gpu', 'transformer_engine')]

ask_again_soon()  # this process has stores, too, whose time to connect is short


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        '--thorough', action='store_true', help='also tests of cases that others nearly cover'
    )
    parser.addoption(
        '--exact-memory',
        action='store_true',
        help='jobs of tests/distributed have a tmpfs of exactly the planned size a node (needs '
        'root)',
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported, and before CUDA is asked for GPUs: it looks only once."""
    paths = [Path(arg.partition('::')[0]).resolve() for arg in config.args]
    if not all(any(map(path.is_relative_to, BY_THEMSELVES)) for path in paths):
        os.environ['CUDA_VISIBLE_DEVICES'] = ''
        cpu_device.hide_transformer_engine()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, unless it is asked for."""
    named = config.option.keyword or any('::' in arg for arg in config.args)
    if config.getoption('--thorough') or named:
        return
    left_out = [item for item in items if item.get_closest_marker('thorough')]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)
