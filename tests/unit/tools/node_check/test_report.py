# SPDX-License-Identifier: Apache-2.0
"""What counts as wrong; a function of what the ranks found."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from tools.lab.errors import LabError
from tools.node_check.place import Place
from tools.node_check.report import GIB, RankReport, Rules, problems

RULES = Rules(needed_bytes=100 * GIB, slowest=0.8)


def reports(**changes: Mapping[str, Any]) -> list[RankReport]:
    """Of two ranks on each of the nodes a, b and c; with changes on some ranks, as `r3={...}`."""
    sound = [
        RankReport(
            rank, 'aabbcc'[rank], {'torch': '2.11', 'driver': '580'}, 200 * GIB, True,
            50.0, 40.0, 10.0, 1980, [],
        )
        for rank in range(6)
    ]  # fmt: skip
    return [msgspec.structs.replace(one, **changes.get(f'r{one.rank}', {})) for one in sound]


@pytest.mark.parametrize(
    ('changes', 'expected'),
    [
        ({}, []),
        ({'r2': {'devices': ['GPU-1: Xid 79']}}, ['b: GPU GPU-1: Xid 79']),
        ({'r4': {'in_memory': False}}, ['c: --sparse-ckpt-dir is not in a tmpfs']),
        (
            {'r0': {'memory_free_bytes': 60 * GIB}},
            [
                'a: 60.0 GiB are free for windows, 100.0 are needed: '
                'mount -o remount,size=... /dev/shm'
            ],
        ),
        ({'r2': {'versions': {'torch': '2.12', 'driver': '580'}}},
         ['b: torch is 2.12, elsewhere 2.11']),
        ({'r4': {'versions': {'torch': '2.11'}}}, ['c: driver is none, elsewhere 580']),
        (
            {'r3': {'copy_gb_s': 39.0}},
            ['b: copies to host memory of rank 3: 39.00 GB/s, below 80% of the median 50.00'],
        ),
        ({'r3': {'copy_gb_s': 41.0}}, []),
        (
            {'r5': {'neighbour_gb_s': 4.0}},
            ['c: sends to the next node of rank 5: 4.00 GB/s, below 80% of the median 40.00'],
        ),
        ({'r1': {'all_reduce_gb_s': 1.0}},
         ['a: all-reduce of rank 1: 1.00 GB/s, below 80% of the median 10.00']),
        ({'r1': {'clock_mhz': 700}}, ['a: clock of rank 1: 700 MHz, below 80% of the median 1980']),
    ],
)  # fmt: skip
def test_problems(changes: Mapping[str, Any], expected: list[str]) -> None:
    assert problems(reports(**changes), RULES) == expected


def test_what_was_not_measured_is_no_problem() -> None:
    nothing = {'neighbour_gb_s': None, 'clock_mhz': None}
    assert problems(reports(**{f'r{rank}': nothing for rank in range(6)}), RULES) == []


def test_places() -> None:
    master = {'MASTER_ADDR': 'a', 'MASTER_PORT': '7'}
    slurm = {'SLURM_PROCID': '3', 'SLURM_NTASKS': '8', 'SLURM_LOCALID': '1', **master}
    assert Place.of(slurm) == (3, 8, 1, 'a', 7)
    torchrun = {'RANK': '5', 'WORLD_SIZE': '6', 'LOCAL_RANK': '2'}
    assert Place.of({**slurm, **torchrun}) == (5, 6, 2, 'a', 7)
    with pytest.raises(LabError, match='RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT'):
        Place.of(torchrun)
