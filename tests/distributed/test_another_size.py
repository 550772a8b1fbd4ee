# SPDX-License-Identifier: Apache-2.0
"""A node is lost and there is no spare: the launcher starts the job again on fewer nodes.

Under `moevement launch`, with one worker on each emulated node; under Slurm:
`tests/unit/launch/test_guests.py`. The final state is compared with that of plain Megatron,
which goes through the same layouts from one dense checkpoint to the next.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moevement_ext.events import Resharded
from moevement_ext.launch.launcher_events import AllStartAgain, GuestsSeated, JobFailed
from tests.distributed.conftest import Make, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.test_elastic import ONE, RESTART, Layout, assert_equal, left_over
from tests.distributed.test_without_spares import Run, run
from tools.lab.evidence import kind_of

pytestmark = [pytest.mark.launcher, pytest.mark.timeout(900)]

FLAGS = (
    '--bf16 --untie-embeddings-and-output-weights --use-distributed-optimizer '
    '--hidden-dropout 0.1 --attention-dropout 0.1 --global-batch-size 12 --train-iters 18'
).split()
DENSE = '--save-interval 100 --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable'.split()
ROOM = '0.006'
"""For the ranks of one node in both layouts, but not for those of two."""
LAYOUT = '--when-no-spare layout --grow-after 0'


def made(cluster: Make, layout: Layout, *flags: str) -> Cluster:
    job = cluster(*FLAGS, *layout.flags(), *RESTART, *ONE, *flags, ranks=4, nodes=4)
    job.flags.append('--exit-signal-handler')
    return job


def plain(
    cluster: Make, folder: Path, stages: Sequence[tuple[Layout, int | None]], *more: str
) -> dict:
    """Digest of plain Megatron, which has each layout until an iteration, the last to its end."""
    load: list[str] = []
    for layout, end in stages:
        dense = folder / f'dense-{end}'
        save = [] if end is None else ['--save', str(dense), '--exit-interval', str(end)]
        flags = [*FLAGS, *layout.flags(), *DENSE, *load, *save, *more]
        job = cluster(*flags, sparse=False, ranks=layout.ranks)
        job.finish(timeout_s=300.0)
        load = ['--load', str(dense)]
    return read_digest(job)


def sizes(done: Run) -> list[int | None]:
    """Numbers of nodes with which all workers started again."""
    return [event.nodes for event in kind_of(done.events, AllStartAgain)]


def test_job_goes_on_with_fewer_nodes_and_grows_again(cluster: Make, tmp_path: Path) -> None:
    """What the smaller job has computed is kept by its planned end: nothing is computed again."""
    four, three = (Layout(ranks) for ranks in (4, 3))
    job = made(cluster, four)
    done = run(job, f'{LAYOUT} --lose-node 1@5 --return-node 1@10')
    assert done.code == 0
    assert sizes(done) == [3, 4]
    shrunk, grown = job.events_of(Resharded)
    assert 4 <= shrunk.dense_at < 10 <= grown.start == grown.dense_at
    said = (job.directory / 'logs' / 'rank2.log').read_text('utf-8')
    assert f'exit at iteration: {grown.dense_at} | windows: kept in' in said
    assert left_over(job) == []
    stages = [(four, shrunk.dense_at), (three, grown.dense_at), (four, None)]
    assert_equal(read_digest(job), plain(cluster, tmp_path, stages))


@pytest.mark.thorough
def test_nodes_are_lost_where_not_every_number_fits(cluster: Make, tmp_path: Path) -> None:
    """Three ranks have no place, as experts are spread over all; nor has the third on return."""
    four, two = (Layout(ranks, expert=ranks) for ranks in (4, 2))
    job = made(cluster, four, '--sparse-ckpt-elastic-layouts', 'ep=2')
    done = run(job, f'{LAYOUT} --lose-node 3@5 --return-node 3@10')
    assert done.code == 0
    assert sizes(done) == [3, 2, 4]
    shrunk, grown = job.events_of(Resharded)
    assert left_over(job) == []
    stages = [(four, shrunk.dense_at), (two, grown.dense_at), (four, None)]
    assert_equal(read_digest(job), plain(cluster, tmp_path, stages))


@pytest.mark.thorough
def test_guests_without_room_give_way_to_another_layout(cluster: Make, tmp_path: Path) -> None:
    four, three = (Layout(ranks) for ranks in (4, 3))
    job = made(cluster, four, '--sparse-ckpt-host-memory-gb', ROOM)
    done = run(job, '--when-no-spare guests --lose-node 3@5')
    assert done.code == 0
    assert kind_of(done.events, GuestsSeated) == []
    [again] = kind_of(done.events, AllStartAgain)
    assert again.nodes == 3
    assert again.reason.count(f'exceeds --sparse-ckpt-host-memory-gb {ROOM}') == 3
    [shrunk] = job.events_of(Resharded)
    stages = [(four, shrunk.dense_at), (three, None)]
    assert_equal(read_digest(job), plain(cluster, tmp_path, stages))


@pytest.mark.thorough
def test_guests_give_way_to_another_layout_after_a_time(cluster: Make, tmp_path: Path) -> None:
    """Their iterations have the bits of four ranks: all until the planned end."""
    four, three = (Layout(ranks) for ranks in (4, 3))
    job = made(cluster, four, '--train-iters', '60')
    done = run(job, '--when-no-spare guests --layout-after 5 --lose-node 1@5')
    assert done.code == 0
    assert len(kind_of(done.events, GuestsSeated)) == 1
    assert sizes(done) == [3]
    [shrunk] = job.events_of(Resharded)
    assert 5 < shrunk.start == shrunk.dense_at < 60
    assert left_over(job) == []
    stages = [(four, shrunk.dense_at), (three, None)]
    assert_equal(read_digest(job), plain(cluster, tmp_path, stages, '--train-iters', '60'))


@pytest.mark.thorough
def test_all_copies_of_a_window_are_lost(cluster: Make, tmp_path: Path) -> None:
    """Fewer ranks train over what is left of it only if told so: from the dense checkpoint."""
    four, two = (Layout(ranks) for ranks in (4, 2))
    dense = f'--save {tmp_path}/dense --load {tmp_path}/dense --save-interval 4'
    job = made(cluster, four, *dense.split(), *DENSE[2:], '--sparse-ckpt-replicas', '1')
    done = run(job, f'{LAYOUT} --lose-node 1@9 2@9')
    assert done.code != 0
    assert sizes(done) == [2]
    [failed] = kind_of(done.events, JobFailed)
    assert 'no node here has the parts of ranks 1, nor a disk' in failed.reason
    assert '--sparse-ckpt-forget goes on without them' in failed.reason
    fewer = replace(job, ranks=2, nodes=2, flags=[*job.flags, '--sparse-ckpt-forget'])
    assert run(fewer, '').code == 0
    stages = [(four, 8), (two, None)]
    assert_equal(read_digest(fewer), plain(cluster, tmp_path, stages))
