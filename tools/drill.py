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
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from moevement_ext.config_file import last_value, value_of
from moevement_ext.events import DeviceProblem

from .lab.digests import compare, read_digest
from .lab.evidence import kind_of, problems
from .lab.following import read_events
from .lab.history import History
from .lab.job import DIGEST
from .lab.launch import PROGRAM, ROOT, as_flags
from .lab.programs import LabError, program, run_tool, split_at_end
from .lab.tables import say
from .lab.trainer_flags import groups, trainer_parser
from .status import failure_table

_DELETED_S = 120.0
_EVENTS = 'events'
# The drill neither loads checkpoints of the real run nor writes any. A store serves one run: each
# job of the drill uses its launcher's.
_LEFT_OUT = """
    --save --load --save-interval --save-retain-interval --non-persistent-save-interval
    --non-persistent-ckpt-type --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir
    --pretrained-checkpoint --ckpt-step --finetune --async-save --exit-interval
    --exit-duration-in-mins --exit-signal-handler --tensorboard-dir --wandb-project --wandb-exp-name
    --wandb-save-dir --sparse-ckpt --sparse-ckpt-run-id --sparse-ckpt-events --sparse-ckpt-metrics
    --sparse-ckpt-digest --sparse-ckpt-store --log-interval --train-iters
""".split()


def main(argv: Sequence[str] | None = None) -> int:
    own, flags = split_at_end(argv)
    args = program('drill', __doc__, allow_abbrev=False).parse_args(own)
    return run_tool('drill', partial(_hold, args, flags))


def _hold(args: argparse.Namespace, flags: Sequence[str], console: Console) -> int:
    if not flags:
        raise LabError('no flags of pretrain_gpt.py: put -- and them after the other flags')
    if not 0 < args.first < args.second < args.iterations:
        raise LabError(
            f'--first {args.first} --second {args.second} --iterations {args.iterations}: each '
            'must be above the one before'
        )
    job_flags = trainer_parser().parse_args(flags)  # exits if a flag is wrong
    memory = [root for root in (job_flags.sparse_ckpt_dir, job_flags.sparse_ckpt_disk) if root]
    run_id = f'drill-{uuid.uuid4().hex[:8]}'
    folder = (args.output or Path('runs', run_id)).absolute()
    if folder.exists():
        raise LabError(f'--output {folder} exists already: give another folder')
    launcher, nodes, spare = _launcher(args)
    faults = ['--kill', f'0@{args.first}']
    faults += ['--kill-node', f'{nodes - 1}@{args.second}'] * spare
    for name, staged in (('undisturbed', []), ('disturbed', faults)):
        own, run = folder / name, f'{run_id}-{name}'
        program = [str(ROOT / PROGRAM), *drill_flags(flags, args.iterations, run, own)]
        say(console, f'drill: the {name} job, in {own}')
        try:
            status = _run([*launcher, '--log-dir', str(own / 'logs'), *staged, '--', *program])
        finally:
            remove_memory(memory, run)
        if status != 0:
            if not staged:  # nothing ran yet: wrong flags, for example
                raise LabError(f'the {name} job ended with status {status}; see its output above')
            say(console, f'drill NOT passed: the {name} job ended with status {status}')
            return 1
    failed = _report(folder, nodes * args.workers_per_node, len(faults) // 2, console)
    lost = f'lost a worker{", a node" if spare else " (no spare: no node)"}'
    verdict = 'NOT passed' if failed else 'passed, all bits are equal'
    say(console, f'drill {verdict}: {lost}; logs and events are in {folder}')
    return int(failed)


def _report(folder: Path, ranks: int, failures: int, console: Console) -> bool:
    """Print recoveries and problems; returns True if there are any problems."""
    undisturbed, disturbed = folder / 'undisturbed', folder / 'disturbed'
    events = read_events(disturbed / _EVENTS)
    if events:
        console.print(failure_table(History(events), time.time()))
    devices = (
        f'rank {event.rank}: GPU {event.device}: {event.what}'
        for event in kind_of([*read_events(undisturbed / _EVENTS), *events], DeviceProblem)
    )
    for line in dict.fromkeys(devices):
        say(console, line, style='yellow')
    differ = compare(console, *(read_digest(one / DIGEST) for one in (undisturbed, disturbed)))
    found = problems(events, ranks, failures, differ)
    for line in found:
        say(console, line, style='bold red')
    return bool(found)


def _launcher(args: argparse.Namespace) -> tuple[list[str], int, bool]:
    """Command line of the launcher, nodes that train, and True if a spare can replace a node."""
    module, more, nodes, spare = 'command_line', ['--nodes', str(args.nodes)], args.nodes, True
    if 'SLURM_JOB_NODELIST' in os.environ:
        module, more = 'slurm', ['--spare-nodes', str(args.spare_nodes)]
        nodes = int(os.environ['SLURM_JOB_NUM_NODES']) - args.spare_nodes
        spare = args.spare_nodes > 0
        for flag, variable in (('--step-flags', 'STEP_FLAGS'), ('--agent-python', 'AGENT_PYTHON')):
            if os.environ.get(variable):  # as scripts/slurm_job.sh passes them
                more.append(f'{flag}={os.environ[variable]}')
    if nodes < 1:
        raise LabError(f'--spare-nodes {args.spare_nodes} leaves no node to train on')
    each = ['--workers-per-node', str(args.workers_per_node)]
    return [sys.executable, '-m', f'moevement_ext.launch.{module}', *more, *each], nodes, spare


def drill_flags(given: Sequence[str], iterations: int, run_id: str, folder: Path) -> list[str]:
    """Turn the flags of the user into those of a short job without lasting output.

    Schedules stay those of the whole run. `folder` is for events, and the digest of the state.
    """
    names = {flag for flag, _ in groups(given)}
    if '--train-samples' in names:
        raise LabError('--train-samples: give a drill --train-iters, and schedules in iterations')
    if value_of(given, '--sparse-ckpt-verify') == 'off':
        raise LabError('--sparse-ckpt-verify off: a drill must verify; leave it out')
    flags: list[str] = []
    for flag, values in groups(given):
        if flag not in _LEFT_OUT:
            flags += [flag, *values] if flag else values
    whole = last_value(given, '--train-iters')
    return flags + as_flags(
        lr_decay_iters=None if '--lr-decay-iters' in names else whole,
        train_iters=iterations,
        log_interval=1,
        sparse_ckpt=True,
        sparse_ckpt_run_id=run_id,
        sparse_ckpt_events=folder / _EVENTS,
        sparse_ckpt_digest=folder / DIGEST,
    )


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


if __name__ == '__main__':
    sys.exit(main())
