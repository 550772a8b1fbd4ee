# SPDX-License-Identifier: Apache-2.0
"""What a job reserves is what the plan says, enough for late windows, and for recoveries.

Recoveries run in a tmpfs of exactly the planned size; `--exact-memory` gives all tests of this
folder such a tmpfs.
"""

import json
import re
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from moevement_ext.events import Protected, ProtectionReduced, Recovered, Replanned, WindowPersisted
from tests.distributed.conftest import Make, Reference, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.harness.faults import SETTLED
from tests.distributed.test_whole_job_recovery import BASE
from tools.plan import __main__ as plan

INSTANCES = (
    '--bf16 --use-distributed-optimizer --num-distributed-optimizer-instances 2 '
    '--untie-embeddings-and-output-weights'
).split()
"""Ranks of one node have stubs of the windows of the other's."""
ALONE = '--bf16 --use-distributed-optimizer --untie-embeddings-and-output-weights'.split()
# Shards of the optimizer are padded to 128 elements; here there is nothing to pad.
UNPADDED = '--hidden-size 128 --moe-ffn-hidden-size 64 --train-iters 4'.split()


def reserved(job: Cluster) -> list[Counter[str]]:
    found = []
    for node in range(job.nodes):
        root = job.node_memory(node)
        kinds = Counter[str]()
        for path in root.rglob('*'):
            if path.is_file():
                kinds[kind(path.relative_to(root))] += 512 * path.stat().st_blocks
        found.append(kinds)
    return found


def kind(path: Path) -> str:
    """Of a file, by its place below the directory of a node."""
    if path.suffix == '.window':
        holder, owner = path.parts[:2]
        return 'own_windows' if holder == owner else 'replicas'
    return {'upstream-log': 'log_ring', 'ledger': 'ledger'}.get(path.name, 'beside')


@pytest.mark.thorough
@pytest.mark.parametrize('layout', [BASE, INSTANCES], ids=['stages', 'instances'])
def test_plan_matches_reserved_memory_to_the_byte(
    layout: list[str], cluster: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = f'--sparse-ckpt-window 2 --sparse-ckpt-log-lag 0.3 --sparse-ckpt-disk {tmp_path}'
    job = cluster(*layout, *UNPADDED, *settings.split())
    found: list[list[Counter[str]]] = []

    def look(workers: list, start: object) -> None:
        log = job.log(job.ranks - 1)
        if log.exists() and 'iteration        1/' in log.read_text():
            with suppress(FileNotFoundError):  # files are renamed meanwhile
                found.append(reserved(job))

    assert job.survive(fault=look) == {}
    steady = next(sizes for sizes, again in pairwise(found) if sizes == again)
    fullest = max(steady, key=Counter.total)

    planned = planned_bytes(job, tmp_path, capsys)
    total, beside = planned.pop('total'), planned.pop('beside')
    assert 0 < fullest.pop('beside') <= beside
    assert planned == dict.fromkeys(planned, 0) | fullest
    assert total == sum(planned.values()) + beside


def planned_bytes(
    job: Cluster, folder: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> dict[str, int]:
    """What the planner says of the fullest node of the job, by kind."""
    machine = folder / 'cluster.json'
    rates = dict.fromkeys(('copy_bytes_per_s', 'network_bytes_per_s', 'peak_flops'), 1e9)
    sizes = dict.fromkeys(('gpu_memory_bytes', 'host_memory_bytes'), 1e11)
    machine.write_text(json.dumps({'name': 'toy', 'gpus_per_node': 2, **rates, **sizes}))
    capsys.readouterr()
    arguments = ['--cluster', str(machine), '--gpus', str(job.ranks), '--iteration-time', '1']
    assert plan.main([*arguments, '--json', '--', *job.flags, *flags]) == 0
    found: dict[str, int] = json.loads(capsys.readouterr().out)['host_memory_bytes_per_node']
    return found


@pytest.mark.thorough
def test_job_allocates_memory_for_the_windows_in_force(
    cluster: Make, reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins with windows of two; once they are of one, to the byte what the plan of one says.

    The job that is started again finds these files, grows them, and comes to the right bits.
    """
    flags = [*ALONE, *UNPADDED[:-1], '30']
    settings = ['max_window=4', 'cpu_share=0']
    job = cluster(*flags, *settings, ranks=1, nodes=1)
    assert job.run(fail_at='0:26:forward') == [-9]
    (left,) = reserved(job)
    assert {event.window for event in job.events_of(Replanned)} == {1}
    begun = job.events_of(Protected)[0].host_memory
    of_one, of_two = (
        planned_bytes(job, tmp_path, capsys, '--sparse-ckpt-window', window)['own_windows']
        for window in '12'
    )
    assert left['own_windows'] == of_one < of_two == begun['own_windows']
    job.finish()
    assert differences(reference(*flags, ranks=1), read_digest(job)) == []


@pytest.mark.thorough
def test_slow_replicas_and_a_failed_capture_delay_windows_for_a_bounded_time(
    cluster: Make, reference: Reference
) -> None:
    """Training waits, skips windows and goes on; the log, given room, still serves a replay."""
    flags = [*BASE, '--train-iters', '15']
    settings = '--sparse-ckpt-window 1 --sparse-ckpt-log-lag 12 max_wait=0.2'.split()
    job = cluster(*flags, *settings)
    mutation = 'mutations.protection:late_replicas_of_rank_1_and_a_failed_capture_on_rank_2'
    assert job.survive(fail_at='3:12:forward', mutation=mutation, timeout_s=600.0) == {3: 1}
    assert differences(reference(*flags), read_digest(job)) == []
    output = job.output(0)
    assert 'is skipped: the one before is not persisted' in output
    assert 'is full' not in output
    (recovered,) = job.events_of(Recovered, rank=3)
    assert recovered.scope == 'localized'
    (failed,) = re.findall(r'window (\d+): ValueError: a capture that fails', output)
    persisted = [event.start for event in job.events_of(WindowPersisted)]
    assert int(failed) not in persisted and max(persisted) > int(failed), persisted


SURVIVED = {
    'one worker': ('1:8:forward', ()),
    'one worker, twice': ('1:8:forward,1:9:forward:1', ()),
    'a stage with the memory of its node': ('2:8:forward,3:8:forward', (1,)),
}


@pytest.fixture
def job(cluster: Make, tmp_path: Path) -> Cluster:
    """With everything that host memory is taken for."""
    disk = tmp_path / 'disk'
    disk.mkdir()
    flags = ['--sparse-ckpt-disk', str(disk), '--sparse-ckpt-disk-every', '3']
    return cluster(*BASE, '--sparse-ckpt-window', '3', *SETTLED, *flags, exact_memory=True)


@pytest.mark.thorough
@pytest.mark.parametrize('lost', SURVIVED)
def test_localized_recovery_fits_the_planned_memory(
    lost: str, job: Cluster, reference: Reference
) -> None:
    fail_at, wiped = SURVIVED[lost]
    assert job.survive(fail_at=fail_at, wipe=wiped)
    check_all_is_protected(job, reference)


@pytest.mark.thorough
def test_two_whole_job_recoveries_fit_the_planned_memory(
    job: Cluster, reference: Reference
) -> None:
    assert -9 in job.run(fail_at='1:8:forward')
    assert -9 in job.run(fail_at='2:10:backward')
    job.finish()
    check_all_is_protected(job, reference)


def check_all_is_protected(job: Cluster, reference: Reference) -> None:
    """The bits are right, and nothing that was planned was left out."""
    assert differences(reference(*BASE), read_digest(job)) == []
    for rank in range(job.ranks):
        assert job.events_of(ProtectionReduced, rank) == []
    assert job.events_of(Recovered, rank=3)
