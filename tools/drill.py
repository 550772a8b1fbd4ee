# SPDX-License-Identifier: Apache-2.0
r"""Game day: runs a short job with your flags twice; in one run a worker and then a node dies.

    sbatch scripts/slurm_drill.sbatch <flags of pretrain_gpt.py>
    moevement drill --nodes 2 -- <flags of pretrain_gpt.py>       # on emulated nodes, here

In a batch script of Slurm the job runs under the launcher for Slurm, and the drill kills a node of
the allocation: its agent, its workers and its windows. Without a spare node it kills only a worker.
The drill neither loads nor writes checkpoints of the real run, and leaves its windows alone. It
deletes its own windows on all nodes, also after a job that failed.

The final states of both runs are compared, bit for bit; where newer captures exist, each recovery
is also verified against them. GPU problems during the drill are listed.

Exit status: 0 the job recovered from every failure and ended with the bits of the undisturbed run,
1 it did not, 2 the drill could not run.
"""

import argparse
import os
import shlex
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from .chaos.verdict import devices, problems, recoveries, table
from .lab.arguments import Parser, at_least, split_at_end
from .lab.benchmark import exit_on_sigterm, print_failure
from .lab.digests import kinds_of_difference, read_digest
from .lab.errors import LabError
from .lab.following import read_events
from .lab.job import DIGEST
from .lab.launch import PROGRAM, ROOT
from .lab.trainer_flags import groups, parse_trainer_flags, value_of

_END = '--'
_UNDISTURBED = 'undisturbed'
_DISTURBED = 'disturbed'
_DELETED_S = 120.0
_EVENTS = 'events'
_LEFT_OUT = {
    # The drill neither loads checkpoints of the real run nor writes any.
    '--save', '--load', '--save-interval', '--save-retain-interval',
    '--non-persistent-save-interval',
    '--non-persistent-ckpt-type', '--non-persistent-global-ckpt-dir',
    '--non-persistent-local-ckpt-dir', '--pretrained-checkpoint', '--ckpt-step', '--finetune',
    '--async-save', '--exit-interval', '--exit-duration-in-mins', '--exit-signal-handler',
    '--tensorboard-dir', '--wandb-project', '--wandb-exp-name', '--wandb-save-dir',
    '--sparse-ckpt', '--sparse-ckpt-run-id', '--sparse-ckpt-events', '--sparse-ckpt-metrics',
    '--sparse-ckpt-digest', '--log-interval', '--train-iters',
    '--sparse-ckpt-store',  # it serves one run; each job of the drill uses its launcher's store
}  # fmt: skip


class _Job(NamedTuple):
    """Launch parameters of the drill."""

    command: list[str]
    """Command line of the launcher, up to its `--`."""
    nodes: int
    workers_per_node: int
    spare: bool
    """A spare can replace a lost node."""


def main(argv: Sequence[str] | None = None) -> int:
    own, flags = split_at_end(argv)
    args = _parser().parse_args(own)
    console = Console()
    exit_on_sigterm()
    try:
        return _hold(args, flags, console)
    except LabError as error:
        print_failure(console, 'drill', error)
        return 2


def _hold(args: argparse.Namespace, flags: Sequence[str], console: Console) -> int:
    if not flags:
        raise LabError(f'no flags of pretrain_gpt.py: put {_END} and them after the other flags')
    if not 0 < args.first < args.second < args.iterations:
        raise LabError(
            f'--first {args.first} --second {args.second} --iterations {args.iterations}: each '
            'must be above the one before'
        )
    job_flags = parse_trainer_flags(flags)  # exits if a flag is wrong
    memory = [root for root in (job_flags.sparse_ckpt_dir, job_flags.sparse_ckpt_disk) if root]
    run_id = f'drill-{uuid.uuid4().hex[:8]}'
    folder = (args.output or Path('runs', run_id)).absolute()
    if folder.exists():
        raise LabError(f'--output {folder} exists already: give another folder')
    job = _job(args)
    faults = ['--kill', f'0@{args.first}']
    if job.spare:
        faults += ['--kill-node', f'{job.nodes - 1}@{args.second}']
    for name, staged in ((_UNDISTURBED, []), (_DISTURBED, faults)):
        own = folder / name
        command = [*job.command, '--log-dir', str(own / 'logs'), *staged, _END, str(ROOT / PROGRAM)]
        console.print(f'drill: the {name} job, in {own}', soft_wrap=True)
        try:
            status = _run([*command, *drill_flags(flags, args.iterations, f'{run_id}-{name}', own)])
        finally:
            remove_memory(memory, f'{run_id}-{name}')
        if status != 0:
            if not staged:  # nothing ran yet: wrong flags, for example
                raise LabError(f'the {name} job ended with status {status}; see its output above')
            console.print(f'drill NOT passed: the {name} job ended with status {status}')
            return 1
    return _report(folder, job, len(faults) // 2, console)


def _report(folder: Path, job: _Job, failures: int, console: Console) -> int:
    states = [read_digest(folder / name / DIGEST) for name in (_UNDISTURBED, _DISTURBED)]
    undisturbed, events = (
        read_events(folder / name / _EVENTS) for name in (_UNDISTURBED, _DISTURBED)
    )
    ranks = job.nodes * job.workers_per_node
    console.print(table(recoveries(events, ranks)))
    for line in devices([*undisturbed, *events]):
        console.print(line, style='yellow', markup=False, soft_wrap=True)
    found = problems(events, ranks, failures, kinds_of_difference(*states))
    for line in found:
        console.print(line, style='bold red', markup=False, soft_wrap=True)
    node = ', a node' if job.spare else ' (no spare: no node)'
    verdict = 'NOT passed' if found else 'passed, all bits are equal'
    lost = f'drill {verdict}: lost a worker{node}; logs and events are in {folder}'
    console.print(lost, soft_wrap=True)
    return 1 if found else 0


def _job(args: argparse.Namespace) -> _Job:
    python, workers = sys.executable, args.workers_per_node
    each = ['--workers-per-node', str(workers)]
    if 'SLURM_JOB_NODELIST' not in os.environ:
        launcher = [python, '-m', 'moevement_ext.launch.command_line', '--nodes', str(args.nodes)]
        return _Job([*launcher, *each], args.nodes, workers, spare=True)
    nodes = int(os.environ['SLURM_JOB_NUM_NODES']) - args.spare_nodes
    if nodes < 1:
        raise LabError(f'--spare-nodes {args.spare_nodes} leaves no node to train on')
    launcher = [python, '-m', 'moevement_ext.launch.slurm', '--spare-nodes', str(args.spare_nodes)]
    for flag, variable in (('--step-flags', 'STEP_FLAGS'), ('--agent-python', 'AGENT_PYTHON')):
        if os.environ.get(variable):  # as scripts/slurm_job.sh passes them
            launcher.append(f'{flag}={os.environ[variable]}')
    return _Job([*launcher, *each], nodes, workers, args.spare_nodes > 0)


def drill_flags(given: Sequence[str], iterations: int, run_id: str, folder: Path) -> list[str]:
    """Turn the flags of the user into those of a short job without lasting output.

    Schedules stay those of the whole run. `folder` is for events, and the digest of the state.
    """
    if '--train-samples' in _names(given):
        raise LabError('--train-samples: give a drill --train-iters, and schedules in iterations')
    if '--sparse-ckpt-verify' in _names(given) and value_of(given, '--sparse-ckpt-verify') == 'off':
        raise LabError('--sparse-ckpt-verify off: a drill must verify; leave it out')
    flags = _without(given, _LEFT_OUT)
    whole = value_of(given, '--train-iters')
    if whole is not None and '--lr-decay-iters' not in _names(given):
        flags += ['--lr-decay-iters', whole]
    flags += ['--train-iters', str(iterations), '--log-interval', '1']
    return [
        *flags, '--sparse-ckpt', '--sparse-ckpt-run-id', run_id,
        '--sparse-ckpt-events', str(folder / _EVENTS), '--sparse-ckpt-digest', str(folder / DIGEST),
    ]  # fmt: skip


def _without(flags: Sequence[str], names: set[str]) -> list[str]:
    kept: list[str] = []
    for flag, values in groups(flags):
        if flag not in names:
            kept += [flag, *values] if flag else values
    return kept


def _names(flags: Sequence[str]) -> set[str]:
    return {flag for flag, _ in groups(flags)}


def _run(command: Sequence[str]) -> int:
    launcher = subprocess.Popen(command)
    try:
        return launcher.wait()
    finally:
        launcher.terminate()
        launcher.wait()


def remove_memory(roots: Sequence[str], run_id: str) -> None:
    """Delete the directories of a run in all its layouts, on each node of the allocation, if any.

    Raises `LabError`, with the command to repeat, if a node cannot be reached.
    """
    remove = f'rm -rf {" ".join(f"{shlex.quote(root)}/{run_id}*" for root in roots)}'
    # All nodes delete the same directory of a shared disk; one of them may come too late.
    command = ['sh', '-c', f'{remove} || {remove}']
    if 'SLURM_JOB_NODELIST' in os.environ:
        command = ['srun', '--no-kill', '--overlap', '--ntasks-per-node=1', *command]
    try:
        subprocess.run(command, check=True, timeout=_DELETED_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise LabError(
            f'windows of {run_id} stay in host memory ({error}); delete them: {shlex.join(command)}'
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog='moevement drill', description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        '--nodes',
        type=at_least(1),
        default=2,
        metavar='N',
        help='emulated nodes, without Slurm (2)',
    )
    add('--spare-nodes', type=int, default=1, metavar='N', help='spare nodes of the allocation (1)')
    add('--workers-per-node', type=at_least(1), default=1, metavar='N',
        help='ranks on each node (1)')  # fmt: skip
    add('--first', type=int, default=20, metavar='N', help='iteration to kill a worker at (20)')
    add('--second', type=int, default=40, metavar='N', help='iteration to kill a node at (40)')
    add('--iterations', type=int, default=60, metavar='N', help='iterations to train (60)')
    add('--output', type=Path, metavar='DIR', help='folder of logs and events, on all nodes '
        '(runs/drill-...)')  # fmt: skip
    return parser


if __name__ == '__main__':
    sys.exit(main())
