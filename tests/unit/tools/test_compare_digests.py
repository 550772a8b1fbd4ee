# SPDX-License-Identifier: Apache-2.0
"""Digest files: what differs is named, and nothing unreadable ever counts as equal."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.compare_digests import main
from tools.lab.digests import differences, read_digest

NAMES = (
    'parameter/decoder.layers.0.mlp.router.weight buffer/decoder.layers.0.mlp.router.bias '
    'master/output_layer.weight exp_avg/output_layer.weight exp_avg_sq/output_layer.weight '
    'step/output_layer.weight rng/torch group/0 loss_scale'
).split()


def state() -> dict[str, Any]:
    ranks = {str(rank): {name: f'{rank}-{name}' for name in NAMES} for rank in range(2)}
    return {'digest': 'total', 'iteration': 40, 'ranks': ranks}


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return write(tmp_path / 'first.json', state())


def test_equal_files_exit_0(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = write(tmp_path / 'second.json', state())
    assert main([str(first), str(second)]) == 0
    assert capsys.readouterr().out == 'equal: 18 digests of 2 ranks after iteration 40\n'


@pytest.mark.parametrize('name', NAMES)
def test_one_changed_entry_is_named_by_rank_and_kind(
    first: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = state()
    changed['ranks']['1'][name] = 'other'
    second = write(tmp_path / 'second.json', changed)
    kind = name.split('/')[0]
    assert differences(read_digest(first), read_digest(second)) == [('1', kind, name)]
    assert main([str(first), str(second)]) == 1
    row = next(line for line in capsys.readouterr().out.splitlines() if kind in line)
    assert [cell.strip() for cell in row.strip('│').split('│')][:4] == ['1', kind, '1', '1']
    assert main([str(first), str(second), '--json']) == 1
    [found] = json.loads(capsys.readouterr().out)['differences']
    assert found == {'rank': '1', 'kind': kind, 'name': name}


@pytest.mark.parametrize(
    'change',
    [
        lambda content: content['ranks']['0'].pop('rng/torch'),
        lambda content: content['ranks'].update({'2': {'rng/torch': 'x'}}),
        lambda content: content.update(iteration=41),
        lambda content: content.update(digest='other'),
    ],
    ids=['entry missing', 'more ranks', 'other iteration', 'total contradicts'],
)
@pytest.mark.parametrize('swapped', [False, True])
def test_nothing_that_differs_passes(
    first: Path, tmp_path: Path, change: Any, swapped: bool
) -> None:
    changed = state()
    change(changed)
    pair = [str(first), str(write(tmp_path / 'second.json', changed))]
    assert main(pair[::-1] if swapped else pair) == 1


@pytest.mark.parametrize(
    'content',
    [
        b'',
        b'\xff\xfe garbage',
        b'{"digest": "x"',
        b'[]',
        b'{"digest": "x", "iteration": 1}',
        b'{"digest": "x", "iteration": "1", "ranks": {}}',
        b'{"digest": "x", "iteration": 1, "ranks": {}}',
        b'{"digest": "x", "iteration": 1, "ranks": {"0": {}}}',
    ],
)
def test_garbage_is_refused_by_name_even_against_itself(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / 'garbage.json'
    path.write_bytes(content)
    assert main([str(path), str(path)]) == 2
    assert str(path) in capsys.readouterr().err
