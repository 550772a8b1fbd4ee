# SPDX-License-Identifier: Apache-2.0
"""Real launchers restart a job with another number of ranks, and it resumes in another layout.

The final state is compared with that of plain Megatron, which goes through the same layouts from
one dense checkpoint to the next.
"""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import Resharded, WindowPersisted, WorkerStarted
from tests.distributed.conftest import Make, read_digest
from tests.distributed.harness.cluster import ROOT, Cluster, free_port, tails
from tests.distributed.harness.torchrun import agent
from tests.distributed.test_elastic import (
    MODEL,
    ONE,
    RESTART,
    Layout,
    assert_equal,
    left_over,
    plain,
    trained,
)
from tests.distributed.test_torchrun import START_S, wait_until

pytestmark = [pytest.mark.timeout(1200), pytest.mark.thorough]

LARGE, SMALL = (Layout(ranks, expert=ranks, sharded=True) for ranks in (4, 2))
QUIET = ['--attention-dropout', '0', '--hidden-dropout', '0', '--train-iters', '24']
LAYOUTS = ['--sparse-ckpt-elastic-layouts', 'ep=2', '--sparse-ckpt-recovery', 'whole-job']
DENSE = '--dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist --save-interval 1'.split()
SRUN = """#!/usr/bin/env python3
import os, sys
host = next(flag.partition('=')[2] for flag in sys.argv if flag.startswith('--nodelist='))
if os.path.exists(f'{sys.argv[0]}.{host}'):
    sys.exit(1)
command = [flag for flag in sys.argv[1:] if not flag.startswith('--')]
os.environ['SLURMD_NODENAME'] = host
with open(f'{sys.argv[0]}.{host}.pid', 'w') as file:
    file.write(str(os.getpid()))
os.execv(command[0], command)
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") tr , '\\n' <<<"$3" ;;
    "requeue 42") echo requeued >>"$0.asked" ;;
    update*) echo "${@:2}" >>"$0.asked" ;;
esac
"""
SQUEUE = '#!/usr/bin/env bash\necho n1\n'


@pytest.fixture
def job(cluster: Make, tmp_path: Path) -> Cluster:
    """A job of four ranks on two nodes, which two ranks may go on with; it saves each iteration."""
    return prepared(cluster, *ONE, *DENSE, '--save', str(tmp_path / 'dense'))


def prepared(cluster: Make, *flags: str) -> Cluster:
    made = cluster(*MODEL, *QUIET, *LARGE.flags(), *RESTART, *LAYOUTS, *flags)
    made.directory.mkdir(parents=True)
    return made


def test_torchrun_continues_on_fewer_nodes_and_grows_again(
    job: Cluster, cluster: Make, tmp_path: Path
) -> None:
    """The node that is lost comes back while two ranks train."""
    stall = tmp_path / 'stall'
    with agents_of(job, stall) as (logs, (first, second, third)):
        agents = [first(), second()]
        hold_at_window(3, job, 4, stall, logs)
        kill(agents.pop())
        hold_at_window(8, job, 2, stall, logs)
        agents.append(third())
        for process in agents:
            assert process.wait(START_S) == 0, tails(logs)
    shrunk, grown = job.events_of(Resharded)
    assert 3 <= shrunk.dense_at < 8 <= grown.dense_at
    assert left_over(job) == []
    assert_equal(read_digest(job), through_small(cluster, tmp_path, shrunk, grown))


@contextmanager
def agents_of(job: Cluster, stall: Path) -> Iterator[tuple[list[Path], list[Callable]]]:
    """Logs and start functions of three agents: one on the first node, two on the second."""
    launch = elastic_launch()
    logs = [job.directory / f'agent{number}.log' for number in range(3)]
    env = {'MOEVEMENT_STALL_FILE': str(stall), 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'}
    env |= job.site()
    with ExitStack() as stack:
        yield (
            logs,
            [
                lambda log=log, node=node: stack.enter_context(
                    agent(launch, job.flags, log, MOEVEMENT_NODE=node, **env)
                )
                for log, node in zip(logs, ('node0', 'node1', 'node1'), strict=True)
            ],
        )


def elastic_launch() -> list[str]:
    """Flags of torchrun for one or two nodes."""
    return (
        f'--nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d '
        f'--rdzv-endpoint 127.0.0.1:{free_port()} --rdzv-conf last_call_timeout=2'
    ).split()


def kill(process: subprocess.Popen[bytes]) -> None:
    lost = psutil.Process(process.pid)
    for one in [lost, *lost.children(recursive=True)]:
        one.kill()


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """Scripts that take the place of Slurm's programs."""
    folder = tmp_path / 'bin'
    folder.mkdir()
    for name, text in (('srun', SRUN), ('scontrol', SCONTROL), ('squeue', SQUEUE)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def test_requeued_job_continues_on_fewer_nodes_and_on_more(
    job: Cluster, cluster: Make, slurm: Path, tmp_path: Path
) -> None:
    """One of two nodes is lost, and returns."""
    bin_ = slurm
    stall = tmp_path / 'stall'
    log = job.directory / 'slurm.log'
    with submitted(job, bin_, log, stall, nodes='n1,n2') as batch:
        hold_at_window(3, job, 4, stall, [log])
        (bin_ / 'srun.n2').touch()
        lost = psutil.Process(int((bin_ / 'srun.n2.pid').read_text()))
        for process in [lost, *lost.children(recursive=True)]:
            process.kill()
        assert batch.wait(START_S) == EXIT_WHOLE_JOB, tails([log])
    assert (bin_ / 'scontrol.asked').read_text() == 'requeued\n'
    with submitted(job, bin_, log, stall, nodes='n1', SLURM_RESTART_COUNT='1') as batch:
        hold_at_window(8, job, 2, stall, [log])
        kill(batch)
    (bin_ / 'srun.n2').unlink()
    with submitted(job, bin_, log, stall, nodes='n1,n2', SLURM_RESTART_COUNT='2') as batch:
        assert batch.wait(START_S) == 0, tails([log])
    shrunk, grown = job.events_of(Resharded)
    assert 3 <= shrunk.dense_at < 8 <= grown.dense_at
    assert left_over(job) == []
    assert_equal(read_digest(job), through_small(cluster, tmp_path, shrunk, grown))


def through_small(cluster: Make, folder: Path, shrunk: Resharded, grown: Resharded) -> dict:
    """Digest of plain Megatron that goes from four ranks to two, and back."""
    small = ['--save', str(folder / 'small'), *DENSE, '--exit-interval', str(grown.dense_at)]
    trained(cluster, SMALL, folder / 'dense', shrunk.dense_at, *QUIET, *small)
    return plain(cluster, LARGE, folder / 'small', grown.dense_at, *QUIET)


def submitted(
    job: Cluster, bin_: Path, log: Path, stall: Path, nodes: str, **env: str
) -> subprocess.Popen[bytes]:
    """The batch script, as Slurm runs it on the first of some nodes."""
    environment = {
        **os.environ,
        'PATH': f'{bin_}:{os.environ["PATH"]}',
        'SLURM_SUBMIT_DIR': str(ROOT),
        'SLURM_JOB_NAME': 'moevement',
        'SLURM_JOB_ID': '42',
        'SLURM_JOB_NODELIST': nodes,
        'SLURM_GPUS_ON_NODE': '2',
        'MOEVEMENT_STALL_FILE': str(stall),
        'CUDA_DEVICE_MAX_CONNECTIONS': '1',
        **job.site(),
        **env,
    }
    with log.open('ab') as output:
        return subprocess.Popen(
            ['bash', 'scripts/slurm_requeue.sbatch', *job.flags],
            cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def hold_at_window(start: int, job: Cluster, ranks: int, stall: Path, logs: list[Path]) -> None:
    """Once the newest life has that window, or a later one, its first rank trains no further."""

    def is_there(rank: int) -> bool:
        started = job.events_of(WorkerStarted, rank)
        held = job.events_of(WindowPersisted, rank)
        return any(one.pid == started[-1].pid and one.start >= start for one in held)

    wait_until(lambda: all(map(is_there, range(ranks))), logs)
    stall.with_name(f'{stall.name}.{job.events_of(WorkerStarted, 0)[-1].pid}').touch()
