# SPDX-License-Identifier: Apache-2.0
"""Orphans of a rank belong to the run, in any layout."""

from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from moevement_ext.config import OFF, RESTART, SparseCheckpointConfig
from moevement_ext.errors import UserError
from moevement_ext.job import joining
from moevement_ext.memory.window.name import RankIdentity
from moevement_ext.recover import launched_alike


class Enough(Exception):
    """Raised to end the set-up."""


@pytest.mark.parametrize(('elastic', 'run'), [(OFF, 'run.0123abcd'), (RESTART, 'run')])
def test_orphans_of_another_layout_are_ended(
    elastic: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense checkpoint writers use several hundred MB each. A stranger ends no process."""
    ended: list[Path] = []

    def write_memory(store: HashStore, directory: Path) -> None:
        raise Enough

    def refuse_stranger(*given: object) -> None:
        raise UserError('a stranger')

    def meet(ending: type[BaseException]) -> None:
        config = SparseCheckpointConfig(dir='/dev/shm', elastic=elastic)
        one = RankIdentity('a', 'b', 0)
        with pytest.raises(ending):
            joining._meet(one, 1, 'run.0123abcd', config, timedelta(seconds=1), None)

    for name in ('isolate_children', 'watch_set_up', '_let_agent_serve'):
        monkeypatch.setattr(joining, name, lambda *given: None)
    monkeypatch.setattr(joining, 'find_orphans', lambda run: [run])
    monkeypatch.setattr(joining, 'end_orphans', ended.extend)
    monkeypatch.setattr(joining, 'launcher_store', lambda timeout: HashStore())
    monkeypatch.setattr(joining.mailbox, 'write_memory', write_memory)
    meet(Enough)
    assert ended == [Path('/dev/shm') / run]
    monkeypatch.setattr(launched_alike, 'refuse_stranger', refuse_stranger)
    meet(UserError)
    assert ended == [Path('/dev/shm') / run]


@pytest.mark.parametrize(
    ('variables', 'store', 'asked'),
    [
        ({'TORCHELASTIC_RUN_ID': 'none', 'LOCAL_RANK': '0'}, None, [256]),
        ({'TORCHELASTIC_RUN_ID': 'none', 'LOCAL_RANK': '1'}, None, []),
        ({'TORCHELASTIC_RUN_ID': 'none', 'LOCAL_RANK': '0'}, 'host:1', []),
        ({'LOCAL_RANK': '0'}, None, []),
    ],
)
def test_only_an_agent_that_may_serve_the_store_gets_more_files(
    variables: dict[str, str],
    store: str | None,
    asked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found: list[int] = []

    def shortage(ranks: int) -> str:
        found.append(ranks)
        return 'too few'

    monkeypatch.setattr(joining, 'shortage_of_agent', shortage)
    monkeypatch.delenv('TORCHELASTIC_RUN_ID', raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for rank in (0, 8):
        joining._let_agent_serve(rank, 256, SparseCheckpointConfig(dir='/dev/shm', store=store))
    assert found == 2 * asked
    assert [record.message for record in caplog.records] == len(asked) * [
        'sparse checkpointing: too few'
    ]
