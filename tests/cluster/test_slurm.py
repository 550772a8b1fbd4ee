# SPDX-License-Identifier: Apache-2.0
"""Node loss on real Slurm with the project's batch scripts: the bits stay the same."""

import math
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from moevement_ext.events import Recovered, WindowPersisted, WorkerStarted
from tests.cluster.slurm import END_STATES, NODES, Slurm
from tests.distributed.conftest import differences, read_digest
from tests.distributed.harness.cluster import ROOT, Cluster
from tests.distributed.harness.store import OutsideStore

pytestmark = pytest.mark.timeout(1800)
PP2 = '--bf16 --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights'
FLAGS = [*PP2.split(), '--train-iters', '60']  # long enough to lose a node during training
WINDOW = ('--sparse-ckpt-window', '2')
WAIT_S = 400.0
"""Includes imports on perhaps two cores that are shared."""
Make = Callable[..., Cluster]


class Submitted:
    """A job of two nodes with one worker each, and optional spare nodes.

    Args:
        slurm: the cluster.
        job: the job to submit.
        script: name in `scripts`.
        nodes: number of nodes of the allocation.
        sbatch: further sbatch flags.
    """

    def __init__(self, slurm: Slurm, job: Cluster, script: str, nodes: int, *sbatch: str) -> None:
        self.slurm = slurm
        self.job = job
        job.directory.mkdir(parents=True, exist_ok=True)
        self.log = job.directory / 'slurm.log'
        self.number = self._submit(script, [f'--nodes={nodes}', *sbatch])

    def _submit(self, script: str, allocation: Sequence[str]) -> int:
        flags = [*self.job.flags, *WINDOW]
        return self.slurm.submit(script, *flags, log=self.log, sbatch=allocation)

    @property
    def output(self) -> str:
        return self.log.read_text(errors='replace') if self.log.exists() else ''

    def wait_for(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not what():
            assert time.monotonic() < deadline, self.output[-6000:]
            assert self.slurm.state(self.number) not in END_STATES or what(), self.output[-6000:]
            time.sleep(0.05)

    def wait_until_persisted(self, windows: int = 1) -> None:
        """Wait until both ranks have persisted this many windows."""
        events = partial(self.job.events_of, WindowPersisted)
        self.wait_for(lambda: all(len(events(rank)) >= windows for rank in range(2)))

    def lose_node(self, name: str) -> None:
        """Kill the node, with the windows in its memory."""
        self.slurm.lose_node(name)
        shutil.rmtree(self.job.memory / name)

    def end(self) -> str:
        """Wait for the end of the job; return its final state."""
        deadline = time.monotonic() + WAIT_S
        while (state := self.slurm.state(self.number)) not in END_STATES:
            assert time.monotonic() < deadline, self.output[-6000:]
            time.sleep(0.2)
        return state

    def field(self, name: str) -> str:
        """A field of `scontrol show job`."""
        return self.slurm.show(self.number)[name]

    def require_node(self, host: str) -> None:
        self.slurm.run('scontrol', 'update', f'JobId={self.number}', f'ReqNodeList={host}')

    def cut_time_limit(self, seconds: int) -> None:
        """Cut the time limit, in whole minutes, to at least `seconds` from now."""
        began = datetime.fromisoformat(self.field('StartTime')).timestamp()
        minutes = math.ceil((time.time() - began + seconds) / 60)
        self.slurm.run('scontrol', 'update', f'JobId={self.number}', f'TimeLimit={minutes}')

    def wait_until_recovered(self, times: int) -> None:
        """Wait until both ranks have recovered this many times."""
        events = partial(self.job.events_of, Recovered)
        self.wait_for(lambda: all(len(events(rank)) >= times for rank in range(2)))

    def check_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 30.0
        while left := self.slurm.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


class FromHere(Submitted):
    """A job whose launcher runs on this host, outside its nodes. It ends with the test.

    Args:
        stack: ends the launcher.
        slurm, job, nodes: as of `Submitted`.
    """

    def __init__(self, stack: ExitStack, slurm: Slurm, job: Cluster, nodes: int) -> None:
        self._stack = stack
        super().__init__(slurm, job, 'slurm_from_here.sh', nodes)

    def _submit(self, script: str, allocation: Sequence[str]) -> int:
        command = [f'scripts/{script}', *allocation, '--gpus-per-node=1', '--cpus-per-task=1']
        with self.log.open('wb') as log:
            launcher = subprocess.Popen(
                [*command, '--', *self.job.flags, *WINDOW],
                cwd=ROOT,
                env=self.slurm.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._stack.callback(launcher.wait)
        self._stack.callback(launcher.terminate)
        deadline = time.monotonic() + WAIT_S
        while not (granted := re.search(r'Granted job allocation (\d+)', self.output)):
            assert launcher.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.05)
        return int(granted[1])


@pytest.fixture
def store() -> Iterator[OutsideStore]:
    """A store outside the nodes of the job."""
    made = OutsideStore()
    yield made
    made.close()


@pytest.fixture
def submit(slurm: Slurm, cluster: Make) -> Callable[..., Submitted]:
    def submitted(script: str, nodes: int, *sbatch: str, more: tuple[str, ...] = ()) -> Submitted:
        return Submitted(slurm, cluster(*FLAGS, *more, ranks=2), script, nodes, *sbatch)

    return submitted


def check_bits(running: Submitted, reference: Callable[..., dict], *more: str) -> None:
    assert running.end() == 'COMPLETED', running.output[-6000:]
    assert differences(reference(*FLAGS, *more, ranks=2), read_digest(running.job)) == []
    running.check_nothing_is_left()
    assert not running.job.memory.exists()


def test_spare_node_replaces_a_lost_node(
    submit: Callable[..., Submitted], reference: Callable[..., dict]
) -> None:
    running = submit('slurm_pretrain.sbatch', 3)
    running.wait_for(lambda: 'hot spare ready' in running.output)
    running.wait_until_persisted()
    running.lose_node(NODES[1])
    check_bits(running, reference)
    for rank in range(2):
        (recovered,) = running.job.events_of(Recovered, rank)
        assert (recovered.scope, recovered.stages) == ('localized', [1])
    assert 'rank 1: a hot spare takes over' in running.output


def test_first_node_is_replaced_if_launcher_and_store_run_elsewhere(
    slurm: Slurm, store: OutsideStore, cluster: Make, reference: Callable[..., dict]
) -> None:
    """With sbatch, the first node would hold both, and the job would end with it."""
    job = cluster(*FLAGS, '--sparse-ckpt-store', store.address, ranks=2)
    with ExitStack() as stack:
        running = FromHere(stack, slurm, job, nodes=3)
        running.wait_for(lambda: 'hot spare ready' in running.output)
        running.wait_until_persisted()
        running.lose_node(NODES[0])
        check_bits(running, reference)
    for rank in range(2):
        (recovered,) = running.job.events_of(Recovered, rank)
        assert (recovered.scope, recovered.stages) == ('localized', [0])
    assert 'rank 0: a hot spare takes over' in running.output


@pytest.mark.thorough
def test_second_spare_takes_over_after_a_controller_restart(
    submit: Callable[..., Submitted], reference: Callable[..., dict], tmp_path: Path
) -> None:
    stall = tmp_path / 'stall'
    longer = ('--train-iters', '60')
    exported = f'--export=ALL,SPARE_NODES=2,MOEVEMENT_STALL_FILE={stall}'
    running = submit('slurm_pretrain.sbatch', 4, exported, more=longer)
    running.wait_for(lambda: running.output.count('hot spare ready') == 2)
    running.wait_until_persisted()
    running.lose_node(NODES[1])
    running.wait_until_recovered(1)
    running.wait_until_persisted(windows=6)
    stalled = Path(f'{stall}.{running.job.events_of(WorkerStarted)[-1].pid}')
    stalled.touch()  # else the job might end before the controller has restarted
    running.slurm.restart_controller()
    running.lose_node(NODES[2])
    stalled.unlink()
    running.wait_until_recovered(2)
    check_bits(running, reference, *longer)
    assert running.output.count('a hot spare takes over') == 2


@pytest.mark.thorough
def test_node_loss_without_a_spare_requeues_the_job(
    submit: Callable[..., Submitted], reference: Callable[..., dict]
) -> None:
    """The requeued job requires the surviving node and resumes from the replicas in its memory."""
    running = submit('slurm_requeue.sbatch', 2)
    running.wait_until_persisted()
    running.lose_node(NODES[1])
    running.wait_for(lambda: running.field('Restarts') == '1')
    running.require_node(NODES[0])
    check_bits(running, reference)
    for rank in range(2):
        (recovered,) = running.job.events_of(Recovered, rank)
        assert recovered.scope != 'localized'


@pytest.mark.thorough
def test_job_saves_before_its_time_limit_and_the_next_resumes(
    slurm: Slurm, cluster: Make, tmp_path: Path
) -> None:
    """A job that exits early writes no digest, so the bits are not compared."""
    long = [*PP2.split(), '--train-iters', '100000']
    job = cluster(*long, '--exit-signal-handler', ranks=2)
    dense = str(tmp_path / 'dense')
    job.flags += ['--save', dense, '--load', dense, '--save-interval', '100000']
    running = Submitted(slurm, job, 'slurm_pretrain.sbatch', 3, '--signal=B:TERM@60')
    running.wait_until_persisted()
    running.cut_time_limit(seconds=75)
    assert running.end() == 'FAILED', running.output[-6000:]
    assert running.field('ExitCode') == f'{128 + signal.SIGTERM}:0'
    running.check_nothing_is_left()
    last = int((tmp_path / 'dense' / 'latest_checkpointed_iteration.txt').read_text())
    ends = ['--exit-interval', str(last + 5)]
    job.flags += ends
    again = Submitted(slurm, job, 'slurm_pretrain.sbatch', 3)
    assert again.end() == 'COMPLETED', again.output[-6000:]
    assert iterations(again.output) == list(range(1, last + 6)), 'each once, over both jobs'


@pytest.mark.thorough
def test_drill(slurm: Slurm, cluster: Make) -> None:
    """A worker and a node are killed on purpose; exit status 0 says that recovery was exact."""
    job = cluster(*PP2.split(), '--train-iters', '1000', '--sparse-ckpt-window', '2', ranks=2)
    job.directory.mkdir(parents=True, exist_ok=True)
    log, folder = job.directory / 'slurm.log', job.directory / 'drill'
    drill = f'--first 8 --second 16 --iterations 24 --output {folder}'
    flags = ('--nodes=3', f'--export=ALL,DRILL={drill}')
    number = slurm.submit('slurm_drill.sbatch', *job.flags, log=log, sbatch=flags)
    ended(slurm, number, log)
    assert slurm.state(number) == 'COMPLETED', log.read_text()[-6000:]
    assert 'drill passed, all bits are equal: lost a worker, a node' in log.read_text()
    assert f'host {NODES[1]}, node 1 of the job, is lost' in log.read_text()


def iterations(log: str) -> list[int]:
    return [int(found) for found in re.findall(r'iteration +(\d+)/.*\| lm loss: ', log)]


def ended(slurm: Slurm, number: int, log: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while slurm.state(number) not in END_STATES:
        assert time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.2)
