# SPDX-License-Identifier: Apache-2.0
"""Game day on emulated nodes: real processes that are killed, and a report of it."""

import json
import sys
from collections.abc import Callable

import pytest

from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.commands import run_to_end

PP2 = '--bf16 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights'
AT = '--nodes 2 --first 8 --second 16 --iterations 22'


@pytest.mark.thorough
def test_drill_passes_with_a_lost_worker_and_a_lost_node(cluster: Callable[..., Cluster]) -> None:
    flags = [*PP2.split(), '--sparse-ckpt-window', '2', '--train-iters', '1000']
    job = cluster(*flags, '--save', '/nowhere/at/all', ranks=2)
    folder = job.directory / 'drill'
    command = [sys.executable, '-m', 'tools.drill', *AT.split(), '--output', str(folder)]
    done = run_to_end([*command, '--', *job.flags], timeout_s=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert 'drill passed, all bits are equal: lost a worker, a node' in done.stdout
    assert 'staged failure --kill 0@8' in done.stderr
    assert 'staged failure --kill-node 1@16; deleted' in done.stderr
    for rank in range(2):
        lines = (folder / 'disturbed' / 'events' / f'rank{rank}.jsonl').read_text().splitlines()
        events = [json.loads(line) for line in lines]
        found = [event for event in events if event['event'] == 'recovered']
        assert [event['stages'] for event in found] == [[0], [1]]
        assert [event['replacements'] for event in found] == [[0], [1]]
        assert events[-1]['event'] == 'finished'
    assert not list(job.memory.parent.glob('drill-*'))
