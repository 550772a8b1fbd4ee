# SPDX-License-Identifier: Apache-2.0
"""Do the stages of an overlapped schedule finish after their groups were reconnected over NCCL?

torch (2.11 to 2.15) has a stream for each pair of ranks in a group that connects with its first
operation. A group that is connected before, as after a failure, has a single stream, on which
each send and receive waits for the previous one. NCCL needs both ends to be present.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ORDER = Path(__file__).with_name('order_of_sends.py')
ROOT = Path(__file__).resolve().parents[5]


class Operation(NamedTuple):
    """A send or a receive; operations that it depends on must finish first."""

    rank: int
    number: int


def orders(stages: int, flush: bool) -> list[list[list[Any]]]:
    command = [sys.executable, str(ORDER), str(stages), str(2 * stages), 'flush' if flush else '']
    variables = {'PYTHONPATH': str(ROOT), 'TORCHDYNAMO_DISABLE': '1'}
    done = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == stages
    return found


def all_finish(orders: list[list[list[Any]]], reconnected: bool) -> bool:
    """True if all operations finish."""
    before: dict[Operation, set[Operation]] = {}
    ways: dict[Any, list[Operation]] = defaultdict(list)
    for rank, entries in enumerate(orders):
        last: dict[Any, Operation] = {}
        waited: set[Operation] = set()
        for number, *what in entries:
            operation = Operation(rank, number)
            if not what:
                waited = waited | {operation}
                continue
            kind, peer, group = what
            stream = group if reconnected else (group, peer)
            before[operation] = waited | ({last[stream]} if stream in last else set())
            last[stream] = operation
            way = (rank, peer) if kind == 'send' else (peer, rank)
            ways[kind, *way, group].append(operation)
    pairs = [
        pair
        for (kind, *way), sends in ways.items()
        if kind == 'send'
        for pair in zip(sends, ways['receive', *way], strict=True)
    ]
    over: set[Operation] = set()
    while ready := [pair for pair in pairs if all(before[one] <= over for one in pair)]:
        over.update(*ready)
        pairs = [pair for pair in pairs if pair not in ready]
    return not pairs


@pytest.mark.parametrize('stages', [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_stages_finish_after_a_recovery(stages: int) -> None:
    found = orders(stages, flush=False)
    assert all_finish(found, reconnected=False) and all_finish(found, reconnected=True)


@pytest.mark.thorough
def test_stages_with_a_flushed_warm_up_deadlock_after_a_recovery() -> None:
    """Hence the rule of whole-job recovery, which can go when this test fails."""
    found = orders(4, flush=True)
    assert all_finish(found, reconnected=False)
    assert not all_finish(found, reconnected=True)
