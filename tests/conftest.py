# SPDX-License-Identifier: Apache-2.0
"""Tests marked `thorough` run with `--thorough`, or when they are named with `::`.

Tests that need a GPU or Transformer Engine run in a session of their own: all other tests train on
the CPU, without either, on any machine.
"""

import gc

gc.disable()  # during imports, until `pytest_collection_finish`

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from megatron.moevement.seams import cpu_device
from tests.suite.sessions import Outcomes
from tests.suite.shards import Shard, recorded

BY_THEMSELVES = [Path(__file__).resolve().parent / name for name in ('gpu', 'transformer_engine')]

# torch's stores query a name server for each address that they connect to; a lost answer costs
# seconds. All addresses in tests are of this machine, so no server is queried.
os.environ['RES_OPTIONS'] = 'attempts:0'


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
    parser.addoption('--shard', type=Shard.parse, metavar='I/N', help='only this part of all files')
    parser.addoption('--outcomes', type=Path, metavar='FILE', help='where to write them, as JSON')


def pytest_configure(config: pytest.Config) -> None:
    """Run before any test is imported, and before CUDA searches for GPUs: it does so once."""
    hide_devices(config.args)
    # No deadline: the time of an example depends on the load of the machine.
    settings.register_profile(
        'chosen',
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=150 if config.getoption('--thorough') else 25,
    )
    settings.load_profile('chosen')
    outcomes = config.getoption('--outcomes')
    if outcomes is not None and not hasattr(config, 'workerinput'):  # one file, not one a worker
        config.pluginmanager.register(Outcomes(outcomes))


def hide_devices(arguments: Sequence[str]) -> None:
    """Hide GPUs and Transformer Engine unless all selected tests need them."""
    paths = [Path(argument.partition('::')[0]).resolve() for argument in arguments]
    if not all(any(map(path.is_relative_to, BY_THEMSELVES)) for path in paths):
        os.environ['CUDA_VISIBLE_DEVICES'] = ''
        cpu_device.hide_transformer_engine()


def pytest_collection_finish() -> None:
    """Skip the objects of all imports in collections of garbage, here and in forks."""
    gc.freeze()
    gc.enable()
    threading.excepthook = partial(unless_it_ends, threading.excepthook)


def unless_it_ends(
    crashes: Callable[[threading.ExceptHookArgs], object], args: threading.ExceptHookArgs
) -> None:
    """To Python a thread that raises SystemExit just ends; pytest would count it as a crash."""
    if not issubclass(args.exc_type, SystemExit):
        crashes(args)


@pytest.hookimpl(trylast=True)  # of those that are left when -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests unless they are requested, and tests of other shards."""
    named = any('::' in arg for arg in config.args)
    chosen = list(items)
    if not (named or config.getoption('--thorough')):
        chosen = [item for item in chosen if not item.get_closest_marker('thorough')]
    shard = config.getoption('--shard')
    if shard is not None:
        files = shard.files(map(_file, chosen), recorded())
        chosen = [item for item in chosen if _file(item) in files]
    left_out = set(items) - set(chosen)
    if left_out:
        items[:] = chosen
        config.hook.pytest_deselected(items=list(left_out))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition('::')[0]
