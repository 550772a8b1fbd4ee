# SPDX-License-Identifier: Apache-2.0
"""Another layout picks up the windows of a job whose workers were all killed.

What it comes to is compared, bit for bit, with plain Megatron of the new layout from a dense
checkpoint of the same iteration, which the first job has saved in each iteration. Where upstream
cannot load one, the state goes to another layout and back before anything is trained.

No sample is lost or used twice: each rank's real loader says which samples it gives to which
iteration. What counts is the last life that began an iteration.
"""

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from moevement_ext.errors import EXIT_USER_ERROR
from moevement_ext.events import Resharded, WindowPersisted, WorkerStarted
from tests.distributed.conftest import Make, read_digest
from tests.distributed.harness.cluster import Cluster, free_port, tails
from tests.distributed.harness.torchrun import agent
from tests.distributed.test_torchrun import START_S, wait_until
from tests.support.quick import with_quick

pytestmark = pytest.mark.timeout(900)

MODEL = ['--bf16', '--untie-embeddings-and-output-weights', '--train-iters', '12']
RESTART = '--sparse-ckpt-elastic restart max_wait=60'.split()
"""No window is skipped because a busy machine replicates the previous one late."""
ONE, THREE = (['--sparse-ckpt-window', window] for window in ('1', '3'))
BEFORE_AN_UPDATE = ','.join(f'0:{iteration}:optimizer' for iteration in range(5, 10))


class Layout(NamedTuple):
    ranks: int
    pipeline: int = 1
    expert: int = 1
    sharded: bool = False
    more: tuple[str, ...] = ()

    def flags(self) -> list[str]:
        sizes = {'pipeline': self.pipeline, 'expert': self.expert}
        found = [
            item
            for name, size in sizes.items()
            for item in (f'--{name}-model-parallel-size', str(size))
        ]
        return [*found, *(['--use-distributed-optimizer'] if self.sharded else []), *self.more]


VPP = ('--num-layers-per-virtual-pipeline-stage', '1')
_ETP = '--expert-tensor-parallel-size'
INSTANCES = ('--num-distributed-optimizer-instances', '2')
TENSOR_PARALLEL = tuple(
    '--tensor-model-parallel-size 2 --sequence-parallel --swiglu '
    '--moe-token-dispatcher-type allgather'.split()
)
ETP_1, ETP_2 = (
    Layout(4, expert=2, sharded=True, more=(*TENSOR_PARALLEL, _ETP, str(size))) for size in (1, 2)
)
PLAIN_ETP_1, PLAIN_ETP_2 = (layout._replace(sharded=False) for layout in (ETP_1, ETP_2))
CASES = {
    'EP 4 to EP 2': (Layout(4, expert=4, sharded=True), Layout(2, expert=2, sharded=True)),
    'EP 2 to EP 4': (Layout(2, expert=2, sharded=True), Layout(4, expert=4, sharded=True)),
    'PP 2 to PP 1': (Layout(4, pipeline=2), Layout(2)),
    'DP to PP': (Layout(2), Layout(2, pipeline=2)),
    'DP 4 to DP 3': (Layout(4, sharded=True), Layout(3, sharded=True)),
    'ETP 1 to ETP 2': (ETP_1, ETP_2),
    'ETP 2 to ETP 1': (ETP_2, ETP_1),
    'ETP 2 to ETP 1, plain optimizer': (PLAIN_ETP_2, PLAIN_ETP_1),
    'VPP to none': (Layout(2, pipeline=2, more=VPP), Layout(2, pipeline=2)),
}
"""Upstream loads a checkpoint of the first in the second."""
THERE_AND_BACK = {
    'one rank': (Layout(1), Layout(1, sharded=True)),
    'EP 4 to EP 1': (Layout(4, expert=4, sharded=True), Layout(2, sharded=True)),
    'sharded to plain': (Layout(4, expert=2, sharded=True), Layout(2, pipeline=2)),
    'several instances': (Layout(4, sharded=True, more=INSTANCES), Layout(2)),
}
MUTATIONS = {
    'EP 4 to EP 2': (
        'an_expert_is_swapped',
        'ranges_are_shifted_by_one',
        'data_go_on_where_so_many_ranks_would_be',
        'streams_are_those_of_another_rank',
        'moments_are_mixed_up',
        'records_of_another_owner_are_served',
    ),
    'ETP 1 to ETP 2': ('experts_are_cut_elsewhere',),
}

ENDS = {
    'signal': ('--exit-signal-handler', 'terminated_in_iteration_6'),
    'notice of a preemption': (
        '--exit-signal-handler --exit-signal SIGUSR1',
        'notified_in_iteration_6',
    ),
    'time limit': ('--exit-duration-in-mins 60', 'an_hour_passes_in_iteration_6'),
}


def killed(cluster: Make, layout: Layout, dense: Path, *flags: str) -> Cluster:
    """A protected job of which all workers are killed in iteration 9; it saves each iteration."""
    saving = ['--save', str(dense), '--save-interval', '1', '--ckpt-format', 'torch_dist']
    if layout.sharded:
        saving.append('--dist-ckpt-optim-fully-reshardable')
    job = cluster(*MODEL, *layout.flags(), *RESTART, *flags, *saving, ranks=layout.ranks)
    assert -9 in job.run(fail_at='0:9:forward')
    return job


def again(job: Cluster, cluster: Make, layout: Layout, *flags: str) -> Cluster:
    """The same run in another layout, with the memory that the killed one has left."""
    after = cluster(*MODEL, *layout.flags(), *RESTART, *flags, ranks=layout.ranks)
    given = [job.name if flag == after.name else flag for flag in after.flags]
    return dataclasses.replace(after, name=job.name, flags=given)


def plain(cluster: Make, layout: Layout, dense: Path, iteration: int, *flags: str) -> dict:
    """Digest of plain Megatron of this layout from a dense checkpoint."""
    return read_digest(trained(cluster, layout, dense, iteration, *flags))


def trained(cluster: Make, layout: Layout, dense: Path, iteration: int, *flags: str) -> Cluster:
    """A job of plain Megatron of this layout, from a dense checkpoint to its end."""
    load = ['--load', str(dense), '--ckpt-step', str(iteration), '--ckpt-format', 'torch_dist']
    reference = cluster(*MODEL, *layout.flags(), *load, *flags, sparse=False, ranks=layout.ranks)
    reference.finish(timeout_s=300.0)
    return reference


def differing(left: dict, right: dict) -> set[tuple[str, str]]:
    assert left['iteration'] == right['iteration']
    assert left['ranks'].keys() == right['ranks'].keys()
    found = set()
    for rank, entries in left['ranks'].items():
        assert entries.keys() == right['ranks'][rank].keys()
        found |= {(rank, k) for k, v in entries.items() if v != right['ranks'][rank][k]}
    return found


def assert_equal(found: dict, expected: dict) -> None:
    """But for the streams of random numbers that upstream gives to all shards of the experts."""
    allowed = {(rank, 'rng/expert-parallel-rng') for rank in expected['ranks']}
    assert differing(found, expected) <= allowed


def resharded(job: Cluster) -> Resharded:
    return job.events_of(Resharded)[-1]


def left_over(job: Cluster) -> list[str]:
    return sorted(path.name for path in job.memory.parent.glob(f'{job.name}*'))


@pytest.mark.parametrize('case', with_quick(CASES, 'EP 4 to EP 2'))
def test_new_layout_matches_a_resume_from_a_dense_checkpoint(
    case: str, cluster: Make, tmp_path: Path
) -> None:
    """The memory of one of two nodes is gone; replicas are fetched from the other."""
    was, now = CASES[case]
    same_stages = was.pipeline == now.pipeline and was.more == now.more
    quiet = [] if same_stages else ['--attention-dropout', '0', '--hidden-dropout', '0']
    if now.ranks == 3:
        quiet += ['--global-batch-size', '12']
    job = killed(cluster, was, tmp_path / 'dense', *ONE, *quiet)
    for memory in job.memory.parent.glob(f'{job.name}.*/node1'):
        shutil.rmtree(memory)
    after = again(job, cluster, now, *ONE, *quiet)
    after.finish(timeout_s=300.0)
    assert resharded(after).dense_at >= 6
    assert resharded(after).remote_bytes == 0 < resharded(after).local_bytes
    if now.ranks > 1:
        assert after.events_of(Resharded, rank=now.ranks - 1)[-1].remote_bytes
    assert left_over(job) == []
    expected = plain(cluster, now, tmp_path / 'dense', resharded(after).dense_at, *quiet)
    found = differing(read_digest(after), expected)
    # Upstream gives all ranks the random numbers of the first expert shard, and none to a job with
    # other stages.
    allowed = {
        (rank, name)
        for rank, entries in expected['ranks'].items()
        for name in entries
        if name.startswith('rng/') and (not same_stages or name == 'rng/expert-parallel-rng')
    }
    assert found <= allowed


@pytest.mark.parametrize('case', with_quick(THERE_AND_BACK))
def test_state_survives_a_round_trip_through_another_layout(
    case: str, cluster: Make, tmp_path: Path
) -> None:
    """The job is struck while it puts the window together, and again before its first update."""
    was, between = THERE_AND_BACK[case]
    job = killed(cluster, was, tmp_path / 'dense', *ONE)
    there = again(job, cluster, between, *ONE)
    assert -9 in there.run(fail_at=BEFORE_AN_UPDATE.replace('optimizer', 'reshard'))
    assert -9 in there.run(fail_at=BEFORE_AN_UPDATE)
    assert -9 in there.run(fail_at=BEFORE_AN_UPDATE)  # from its own window
    back = again(job, cluster, was, *ONE)
    back.finish(timeout_s=300.0)
    assert resharded(back).dense_at == resharded(there).dense_at >= 6
    assert left_over(job) == []
    expected = plain(cluster, was, tmp_path / 'dense', resharded(back).dense_at)
    assert_equal(read_digest(back), expected)


@pytest.mark.thorough
def test_longer_window_is_converted_in_the_new_layout(cluster: Make, tmp_path: Path) -> None:
    """Starts that are refused before leave the windows where they are."""
    was, now = CASES['EP 4 to EP 2']
    job = killed(cluster, was, tmp_path / 'dense', *THREE)
    exact = again(job, cluster, now, *THREE, '--sparse-ckpt-elastic-exact')
    assert set(exact.run(all_end=True)) == {EXIT_USER_ERROR}
    assert '--sparse-ckpt-elastic-exact: the newest window has 3 slots' in exact.output(0)
    three = Layout(3, expert=4, sharded=True)
    many = again(job, cluster, three, *THREE, '--sparse-ckpt-elastic-layouts', 'ep=2')
    assert set(many.run(all_end=True)) == {EXIT_USER_ERROR}
    assert 'Start 2 ranks, or list a layout for 3.' in many.output(0)
    after = again(job, cluster, now, *THREE)
    after.finish(timeout_s=300.0)
    assert 'equal up to rounding' in after.output(0)
    assert left_over(job) == []
    expected = plain(cluster, now, tmp_path / 'dense', resharded(after).dense_at)
    counted = {'scheduler/num_steps', 'consumed_train_samples', 'rng/model-parallel-rng'}
    assert not counted & {name for _, name in differing(read_digest(after), expected)}


@pytest.mark.thorough
@pytest.mark.mutation
@pytest.mark.parametrize('case', MUTATIONS)
def test_broken_reshard_changes_the_bits(case: str, cluster: Make, tmp_path: Path) -> None:
    was, now = CASES[case]
    job = killed(cluster, was, tmp_path / 'dense', *ONE)
    (memory,) = job.memory.parent.glob(f'{job.name}.*')
    kept = shutil.copytree(memory, memory.with_name(f'kept-{job.name}'))
    try:
        found = {}
        for mutation in ('none', *MUTATIONS[case]):
            shutil.rmtree(memory, ignore_errors=True)
            shutil.copytree(kept, memory)
            shutil.rmtree(memory / 'node1')  # so that its rank reads from the other node
            after = again(job, cluster, now, *ONE)
            broken = {} if mutation == 'none' else {'mutation': f'mutations.elastic:{mutation}'}
            after.finish(timeout_s=300.0, **broken)
            found[mutation] = read_digest(after)
    finally:
        shutil.rmtree(kept)
    sound = found.pop('none')
    assert [name for name, digest in found.items() if not differing(digest, sound)] == []


@pytest.mark.thorough
@pytest.mark.parametrize('on_disk', [False, True], ids=['in memory', 'on disk'])
def test_planned_exit_leaves_the_whole_state_in_one_slot(
    on_disk: bool, cluster: Make, tmp_path: Path
) -> None:
    """With windows of three iterations; nothing is computed again, and the bits are exact."""
    was, now = CASES['EP 4 to EP 2']
    dense = tmp_path / 'dense'
    saving = ['--save', str(dense), '--save-interval', '1', '--ckpt-format', 'torch_dist']
    saving.append('--dist-ckpt-optim-fully-reshardable')
    first = cluster(*MODEL, *was.flags(), *saving, '--exit-interval', '7', sparse=False)
    first.finish(timeout_s=300.0)
    kept = [*THREE, '--sparse-ckpt-disk', str(tmp_path / 'disk')] if on_disk else THREE
    (tmp_path / 'disk').mkdir()
    job = cluster(*MODEL, *was.flags(), *RESTART, *kept, '--exit-interval', '7')
    job.finish(timeout_s=300.0)
    if on_disk:
        for memory in job.memory.parent.glob(f'{job.name}.*'):
            shutil.rmtree(memory)
    after = again(job, cluster, now, *kept)
    after.finish(timeout_s=300.0)
    assert (resharded(after).start, resharded(after).dense_at) == (7, 7)
    assert 'equal up to rounding' not in after.output(0)
    assert left_over(job) == [*(tmp_path / 'disk').iterdir()] == []
    found = differing(read_digest(after), plain(cluster, now, dense, 7))
    assert found <= {('1', 'rng/expert-parallel-rng')}


@pytest.mark.thorough
@pytest.mark.parametrize('end', ENDS)
def test_any_planned_end_leaves_the_whole_state_in_one_slot(
    end: str, cluster: Make, tmp_path: Path
) -> None:
    """Also with a dense checkpoint, which not every new layout could load."""
    flags, mutation = ENDS[end]
    was, now = CASES['DP to PP']
    dense = str(tmp_path / 'dense')
    saving = ['--save', dense, '--save-interval', '100', '--ckpt-format', 'torch_dist']
    three = [*THREE, *saving, '--load', dense]
    job = cluster(*MODEL, *was.flags(), *RESTART, *three, *flags.split(), ranks=was.ranks)
    job.finish(timeout_s=300.0, mutation=f'mutations.ending:{mutation}')
    assert 'exit at iteration: 6 | windows: kept in' in job.output(0)
    assert Path(dense, 'latest_checkpointed_iteration.txt').read_text() == '6'
    after = again(job, cluster, now, *three)
    after.finish(timeout_s=300.0)
    assert (resharded(after).start, resharded(after).dense_at) == (6, 6)
    assert left_over(job) == []


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_torchrun_continues_on_fewer_nodes_and_grows_again(cluster: Make, tmp_path: Path) -> None:
    """The node that is lost comes back while two ranks train."""
    large, small = CASES['EP 4 to EP 2']
    quiet = '--attention-dropout 0 --hidden-dropout 0 --train-iters 24'.split()
    layouts = '--sparse-ckpt-elastic-layouts ep=2 --sparse-ckpt-recovery whole-job'.split()
    saving = (
        '--dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist --save-interval 1'.split()
    )
    job = cluster(*MODEL, *quiet, *large.flags(), *RESTART, *layouts, *ONE, *saving)
    job.flags += ['--save', str(tmp_path / 'dense')]
    job.directory.mkdir(parents=True)
    stall, logs = tmp_path / 'stall', [job.directory / f'agent{number}.log' for number in range(3)]
    launch = (
        '--nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d '
        f'--rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-conf last_call_timeout=2,is_host='
    )
    env = {'MOEVEMENT_STALL_FILE': str(stall), 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'}
    env |= job.site()
    with ExitStack() as stack:
        first, lost, back = (
            lambda log=log, node=node: stack.enter_context(
                agent(
                    f'{launch}{node == "node0"}'.split(), job.flags, log, MOEVEMENT_NODE=node, **env
                )
            )
            for log, node in zip(logs, ('node0', 'node1', 'node1'), strict=True)
        )
        stays, node = first(), psutil.Process(lost().pid)
        hold_at_window(3, job, 4, stall, logs)
        for process in [node, *node.children(recursive=True)]:
            process.kill()
        hold_at_window(8, job, 2, stall, logs)
        for process in stays, back():
            assert process.wait(START_S) == 0, tails(logs)
    shrunk, grown = job.events_of(Resharded)
    assert 3 <= shrunk.dense_at < 8 <= grown.dense_at
    assert left_over(job) == []
    ends = ['--save', str(tmp_path / 'small'), *saving, '--exit-interval', str(grown.dense_at)]
    trained(cluster, small, tmp_path / 'dense', shrunk.dense_at, *quiet, *ends)
    expected = plain(cluster, large, tmp_path / 'small', grown.dense_at, *quiet)
    assert_equal(read_digest(job), expected)


def hold_at_window(start: int, job: Cluster, ranks: int, stall: Path, logs: list[Path]) -> None:
    """Once the newest life has that window, or a later one, its first rank trains no further."""

    def is_there(rank: int) -> bool:
        started = job.events_of(WorkerStarted, rank)
        held = job.events_of(WindowPersisted, rank)
        return any(one.pid == started[-1].pid and one.start >= start for one in held)

    wait_until(lambda: all(map(is_there, range(ranks))), logs)
    stall.with_name(f'{stall.name}.{job.events_of(WorkerStarted, 0)[-1].pid}').touch()


BATCH, ITERATIONS = 12, 12
FLAGS = [*MODEL, '--global-batch-size', str(BATCH)]
PROBE = 'probes.samples:record'
FOUR, THREE_RANKS = Layout(4, sharded=True), Layout(3, sharded=True)
LOADERS = {
    'in order': [],
    'in order, with processes': ['--num-workers', '1'],
    'shuffled': ['--dataloader-type', 'cyclic', '--no-data-sharding'],
}


def recorded(cluster: Make, *flags: str) -> Cluster:
    job = cluster(*FLAGS, *FOUR.flags(), *RESTART, *flags)
    assert -9 in job.run(fail_at='0:9:forward', mutation=PROBE)
    return job


def accepted(lives: Sequence[Cluster]) -> dict[int, Counter[int]]:
    """Samples of each iteration over all ranks, in the last life that began it."""
    found: dict[int, Counter[int]] = {}
    for life in lives:
        of_life: dict[int, Counter[int]] = {}
        for path in life.directory.glob('samples-*.jsonl'):
            for line in path.read_text().splitlines():
                iteration, samples = json.loads(line)
                of_life.setdefault(iteration, Counter()).update(samples)
        found |= of_life
    return found


@pytest.mark.thorough
@pytest.mark.parametrize('window', [ONE, THREE], ids=['window 1', 'window 3'])
@pytest.mark.parametrize('loader', LOADERS)
def test_every_sample_is_trained_on_once(loader: str, window: list[str], cluster: Make) -> None:
    """Four ranks deal a batch otherwise than three."""
    given = LOADERS[loader]
    job = recorded(cluster, *window, *given)
    after = again(job, cluster, THREE_RANKS, '--global-batch-size', str(BATCH), *window, *given)
    after.finish(timeout_s=300.0, mutation=PROBE)
    assert resharded(after).dense_at >= 4
    fault_free = cluster(*FLAGS, *FOUR.flags(), *given, sparse=False)
    fault_free.finish(timeout_s=300.0, mutation=PROBE)
    found, expected = accepted([job, after]), accepted([fault_free])
    assert {len(ranks) for ranks in (found, expected)} == {ITERATIONS}
    assert {sum(samples.values()) for samples in expected.values()} == {BATCH}
    assert found == expected
    assert set(sum(found.values(), Counter()).values()) == {1}


@pytest.mark.mutation
@pytest.mark.thorough
def test_a_wrong_position_of_the_data_is_counted(cluster: Make) -> None:
    was, now = Layout(1), Layout(1, sharded=True)
    job = cluster(*FLAGS, *was.flags(), *RESTART, *ONE, ranks=1)
    assert -9 in job.run(fail_at='0:9:forward', mutation=PROBE)
    after = again(job, cluster, now, '--global-batch-size', str(BATCH), *ONE)
    broken = 'mutations.elastic:data_go_on_where_so_many_ranks_would_be'
    after.finish(timeout_s=300.0, mutation=f'{PROBE},{broken}')
    counted = sum(accepted([job, after]).values(), Counter())
    assert set(counted.values()) == {1, 2}
