# SPDX-License-Identifier: Apache-2.0
"""Tests marked `thorough` run with `--thorough`, or when they are named on the command line.

On a machine without a GPU those of Transformer Engine run by themselves: beside them, others would
have it, too, whose jobs do not.
"""

from pathlib import Path

import pytest

from megatron.moevement.seams import cpu_device
from moevement_ext.process.name_lookups import ask_again_soon

ask_again_soon()  # this process has stores, too, whose time to connect is short


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        '--thorough', action='store_true', help='also tests of cases that others nearly cover'
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported."""
    folders = [Path(arg.partition('::')[0]).absolute().parts for arg in config.args]
    alone = all('transformer_engine' in folder for folder in folders)
    if cpu_device.needed() and not alone:
        cpu_device.hide_transformer_engine()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, unless it is asked for."""
    named = config.option.keyword or any('::' in arg for arg in config.args)
    if config.getoption('--thorough') or named:
        return
    left_out = [item for item in items if item.get_closest_marker('thorough')]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)
