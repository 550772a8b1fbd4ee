# SPDX-License-Identifier: Apache-2.0
"""Differences of two launches are named with both values."""

import random

import pytest

from moevement_ext.memory.window import settings
from moevement_ext.memory.window.settings import RunSettings, differences

OWN = RunSettings(
    flags={'--seed': '1234', '--lr': '0.1'},
    layout={'--expert-model-parallel-size': '2'},
    files={'/data/a.idx': '10 sequences'},
    versions={'torch': '2.14.1'},
    environment={'NCCL_ALGO': 'Ring'},
)


@pytest.mark.parametrize(
    ('part', 'table', 'line'),
    [
        ('flags', {'--seed': '4321', '--lr': '0.1'}, '--seed: was 4321, is 1234'),
        ('flags', {'--lr': '0.1'}, '--seed: was absent, is 1234'),
        ('layout', {}, '--expert-model-parallel-size: was absent, is 2'),
        ('files', {'/data/a.idx': '9 sequences'}, '/data/a.idx: was 9 sequences, is 10 sequences'),
    ],
)
def test_differences_that_decide_bits_are_decisive(part: str, table: dict, line: str) -> None:
    other = RunSettings(**{**_parts(OWN), part: table})
    assert differences(other, OWN) == ([line], [])
    assert differences(other, OWN).lines == [line]


@pytest.mark.parametrize(
    ('part', 'table', 'line'),
    [
        ('versions', {'torch': '2.15'}, 'torch: rank 3 2.15, rank 0 2.14.1'),
        ('versions', {}, 'torch: rank 3 absent, rank 0 2.14.1'),
        ('environment', {'NCCL_ALGO': 'Tree'}, 'NCCL_ALGO: rank 3 Tree, rank 0 Ring'),
    ],
)
def test_differences_that_may_decide_bits_are_doubtful(part: str, table: dict, line: str) -> None:
    other = RunSettings(**{**_parts(OWN), part: table})
    assert differences(other, OWN, ('rank 3', 'rank 0')) == ([], [line])


def test_file_missing_on_one_rank_is_no_difference() -> None:
    blind = RunSettings(**{**_parts(OWN), 'files': {'/data/b.idx': '1 sequence'}})
    assert not differences(blind, OWN) and not differences(OWN, blind)


@pytest.mark.parametrize(
    'damaged', [b'', b'x', settings.encode(OWN)[:-20], settings.encode(OWN)[4:]]
)
def test_damaged_bytes_are_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match='decoded'):
        settings.decode(damaged)


@pytest.mark.parametrize(('files', 'length'), [(0, 5000), (300, 40), (20_000, 70)])
def test_bounded_settings_fit_and_stay_distinguishable(files: int, length: int) -> None:
    noise = random.Random(1)
    long = ''.join(noise.choices('abcdef0123456789', k=length))
    table = {f'/data/{noise.random()}.idx': f'{noise.random()}{long}' for _ in range(files)}
    one = settings.bounded(RunSettings({'--data-path': long}, files=table))
    changed = dict(table) | ({list(table)[-1]: 'other'} if table else {})
    other = settings.bounded(
        RunSettings({'--data-path': long if table else f'{long}x'}, files=changed)
    )
    assert len(settings.encode(one)) <= settings.MAX_BYTES
    assert settings.decode(settings.encode(one)) == one
    assert len(differences(one, other).decisive) == 1


def test_long_lists_of_differences_are_shortened() -> None:
    assert settings.told([f'{n}' for n in range(8)]) == '0; 1; 2; 3; 4; 5; and 2 more'


def _parts(of: RunSettings) -> dict:
    return {name: getattr(of, name) for name in RunSettings.__struct_fields__}
