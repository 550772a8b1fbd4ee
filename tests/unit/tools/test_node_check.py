# SPDX-License-Identifier: Apache-2.0
"""What counts as wrong, of what the ranks found; and the flags."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tools.lab.errors import LabError
from tools.node_check import (
    GIB,
    Place,
    RankReport,
    _parser,
    _planned_bytes,
    _split,
    problems,
    rates,
)
from tools.plan.__main__ import parse_arguments as parse_plan


def reports(**changes: Mapping[str, Any]) -> list[RankReport]:
    """Of two ranks on each of the nodes a, b and c; with changes on some ranks, as `r3={...}`."""
    sound = [
        RankReport(
            rank, 'aabbcc'[rank], {'torch': '2.11', 'apex': '0.1'}, {'NCCL_ALGO': 'Ring'},
            200 * GIB, True, 50.0, 40.0,
        )
        for rank in range(6)
    ]  # fmt: skip
    return [msgspec.structs.replace(one, **changes.get(f'r{one.rank}', {})) for one in sound]


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({}, []),
        ({'r4': {'in_memory': False}}, ['c: --sparse-ckpt-dir is not in a tmpfs']),
        (
            {'r0': {'memory_free_bytes': 60 * GIB}},
            [
                'a: 60.0 GiB are free for windows, 100.0 are needed: '
                'mount -o remount,size=... /dev/shm'
            ],
        ),
        ({'r2': {'versions': {'torch': '2.12', 'apex': '0.1'}}},
         ['b: torch is 2.12, elsewhere 2.11']),
        ({'r4': {'versions': {'torch': '2.11'}}}, ['c: apex is none, elsewhere 0.1']),
        ({'r0': {'variables': {}}}, ['a: NCCL_ALGO is none, elsewhere Ring']),
        ({'r2': {'variables': {'NCCL_ALGO': 'Ring', 'NVTE_FUSED_ATTN': '0'}}},
         ['b: NVTE_FUSED_ATTN is 0, elsewhere none']),
    ],
)  # fmt: skip
def test_problems_are_named_by_node(changes: Mapping[str, Any], expected: list[str]) -> None:
    assert problems(reports(**changes), needed_bytes=100 * GIB) == expected


def test_slowest_rates_are_flags_of_a_plan() -> None:
    """Copies are those of a GPU, sends those of all ranks of a node."""
    found = reports(r1={'copy_gb_s': 9.0}, r5={'neighbour_gb_s': 4.0})
    assert rates(found) == {'--copy-bandwidth': 9.0, '--network-bandwidth': 44.0}
    assert rates(reports(**{f'r{rank}': {'neighbour_gb_s': None} for rank in range(6)})) == {
        '--copy-bandwidth': 50.0
    }
    parse_plan(['--model', 'deepseek-v3', '--mfu', '0.35', *flatten(rates(found))])


def flatten(flags: Mapping[str, float]) -> list[str]:
    return [word for flag, rate in flags.items() for word in (flag, str(rate))]


def test_places_are_read_from_the_environment() -> None:
    master = {'MASTER_ADDR': 'a', 'MASTER_PORT': '7'}
    slurm = {'SLURM_PROCID': '3', 'SLURM_NTASKS': '8', 'SLURM_LOCALID': '1', **master}
    assert Place.of(slurm) == (3, 8, 1, 'a', 7)
    torchrun = {'RANK': '5', 'WORLD_SIZE': '6', 'LOCAL_RANK': '2'}
    assert Place.of({**slurm, **torchrun}) == (5, 6, 2, 'a', 7)
    with pytest.raises(LabError, match='RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT'):
        Place.of(torchrun)


# ---- flags

MODEL = ['--num-layers', '32', '--hidden-size', '4096']


@pytest.mark.parametrize(
    ('given', 'own'),
    [
        ([], []),
        (['--need-gib', '300'], ['--need-gib', '300']),
        (['--need-gib', '300', '--', *MODEL], ['--need-gib', '300']),
        (['--', *MODEL], []),
        (MODEL, []),  # torchrun has dropped the `--`
    ],
)
def test_flags_of_the_training_are_separated(given: list[str], own: list[str]) -> None:
    assert _split(given) == (own, MODEL if '--num-layers' in given else [])


@pytest.mark.parametrize('size', ['nan', 'inf', '-1', 'much'])
def test_memory_is_a_finite_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(['--need-gib', size])
    assert '--need-gib' in capsys.readouterr().err


def test_windows_are_planned_for_the_memory_of_the_nodes() -> None:
    """As in a training: `auto` takes the longest windows that fit, else shorter ones."""
    flags = (
        '--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --bf16 '
        '--num-experts 16 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 8'
    ).split()

    def needed(free: int) -> int:
        reports = [
            RankReport(rank, f'node{rank // 2}', {}, {}, free, True, 1.0, 1.0) for rank in range(4)
        ]
        return _planned_bytes(0, flags, reports)

    enough = needed(1 << 40)
    assert enough // 2 < needed(enough - 1) < enough
