# SPDX-License-Identifier: Apache-2.0
"""When a job that lacks nodes waits for more nodes, and how it ends."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.job import other_layouts
from moevement_ext.recover.reshard.found import NodesMissing

MISSING = NodesMissing('2 ranks are missing', 4)
PARTS = NodesMissing('parts of rank 2 are missing')


class Ended(Exception):
    """Raised instead of ending the process."""


@pytest.mark.parametrize(
    ('commands', 'variable', 'most'),
    [
        ([['python', 'torchrun', '--nnodes', '2:4', 'train.py']], None, 4),
        ([['python', 'torchrun', '--nnodes=2:4', 'train.py']], None, 4),
        ([['python', 'wrapper.py'], ['torchrun', '--nnodes', '3']], None, 3),
        ([['python', 'torchrun', 'train.py']], '1:2', 2),
        ([['python', 'torchrun', '--nnodes']], None, 0),
        ([['python', 'torchrun', 'train.py']], None, 0),
    ],
)
def test_most_nodes_is_read_from_the_torchrun_command(
    commands: list[list[str]], variable: str | None, most: int
) -> None:
    assert other_layouts._most_nodes(commands, variable) == most


@pytest.mark.parametrize(
    ('run', 'nodes', 'may_come'), [(None, '1', False), ('run', '1', True), ('run', '2', False)]
)
def test_nodes_may_come_up_to_the_maximum_of_torchrun(
    run: str | None, nodes: str, may_come: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv('TORCHELASTIC_RUN_ID', raising=False)
    if run is not None:
        monkeypatch.setenv('TORCHELASTIC_RUN_ID', run)
    monkeypatch.setenv('GROUP_WORLD_SIZE', nodes)
    monkeypatch.setattr(other_layouts, '_command_lines', lambda: [['torchrun', '--nnodes', '1:2']])
    assert other_layouts.nodes_may_come() is may_come


@pytest.mark.parametrize(
    ('torchrun', 'may_come', 'missing', 'did'),
    [
        (True, True, MISSING, ['waits', 'ends']),
        (True, True, PARTS, ['waits']),
        (True, False, MISSING, []),
        (False, False, MISSING, ['ends']),
        (False, False, PARTS, []),
    ],
)
def test_job_waits_or_ends_by_launcher_and_missing_nodes(
    torchrun: bool,
    may_come: bool,
    missing: NodesMissing,
    did: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done, told = [], []

    def exchange(name: str, own: bytes) -> list[bytes]:
        return [own]

    def end(code: int) -> None:
        assert code == EXIT_WHOLE_JOB
        done.append('ends')
        raise Ended

    exchange.timeout = timedelta(seconds=0)  # type: ignore[attr-defined]
    rank: Any = SimpleNamespace(number=0, exchange=exchange)
    for name, instead in (
        ('nodes_may_come', lambda: may_come),
        ('under_torchrun', lambda: torchrun),
        ('launcher_store', lambda timeout: object()),
        ('write_needed_ranks', lambda store, ranks: told.append(ranks)),
        ('announce', lambda number, code: told.append(code)),
        ('_listen_to_signals', lambda: done.append('waits')),
        ('end_at_once', end),
    ):
        monkeypatch.setattr(other_layouts, name, instead)
    try:
        other_layouts.without_nodes(rank, missing)
    except Ended:
        assert told == [4, EXIT_WHOLE_JOB]
    assert done == did
    said = capsys.readouterr().out
    assert (f'waits up to 0 minutes for more nodes | {missing} |' in said) == ('waits' in did)
