# SPDX-License-Identifier: Apache-2.0
"""The launcher in a Slurm batch script: its command line, the time limit, and requeueing."""

import argparse
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moevement_ext.command import data
from moevement_ext.config import ConfigurationError
from moevement_ext.errors import EXIT_WHOLE_JOB
from moevement_ext.events import Event
from moevement_ext.launch.command_line import add_flags, configured, parse_before_program
from moevement_ext.launch.launch_config import LaunchConfig, unnamed_run_id
from moevement_ext.launch.launcher_events import (
    NodeLost,
    NodeMissing,
    NodeReady,
    WorkerLaunched,
)
from moevement_ext.launch.node import slurm_step
from moevement_ext.launch.output import give_up_unwritten, say_of_launcher
from moevement_ext.system.leaving import Parser, stop_at_signals
from moevement_ext.system.process_setup import ask_again_soon

_DESCRIPTION = """\
Runs a training program on the nodes of a Slurm allocation, from the batch script. A worker that
dies is replaced at once, and a lost node is replaced by a spare node; the other workers keep
running.

  moevement slurm --write-script train.sbatch       # of which this is the last command:
  exec moevement slurm --spare-nodes 1 --workers-per-node 8 -- pretrain_gpt.py ...
"""
_ENDED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class _SlurmJob:
    """A parsed command line in an allocation."""

    launch: LaunchConfig
    hosts: tuple[str, ...]
    requeue: bool
    before_end_s: float | None
    step_flags: tuple[str, ...] = ()
    """Additional flags of `srun` for the agents."""
    agent_python: tuple[str, ...] = (sys.executable,)
    """Command that runs Python on the nodes."""


def parse(argv: Sequence[str]) -> _SlurmJob:
    """Parse the launcher's flags, `--`, program and its flags; ends the process on an error."""
    parser = _parser()
    args = parse_before_program(parser, argv)
    try:
        hosts = _hosts()
        if not 0 <= args.spare_nodes < len(hosts):
            raise ConfigurationError(
                f'--spare-nodes {args.spare_nodes} must be at least 0 and leave a node to train '
                f'on; the allocation has {len(hosts)}: ask for more with sbatch --nodes.'
            )
        nodes = len(hosts) - args.spare_nodes
        launch = configured(args, nodes, grace_s=args.grace)
        if args.before_end is not None and not args.before_end >= 0:
            raise ConfigurationError(f'--before-end {args.before_end} must be at least 0.')
    except ConfigurationError as error:
        parser.error(str(error))
    step_flags = tuple(shlex.split(args.step_flags))
    python = tuple(shlex.split(args.agent_python)) or (sys.executable,)
    return _SlurmJob(launch, hosts, args.requeue, args.before_end, step_flags, python)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; returns the exit status, 0 if all workers ended with 0."""
    ask_again_soon()
    job = parse(sys.argv[1:] if argv is None else argv)
    from moevement_ext.launch.hosts import SlurmStarter
    from moevement_ext.launch.supervisor import Supervisor
    from moevement_ext.launch.worker import print_event  # torch: too slow for --help
    from moevement_ext.store import allow_many_connections

    allow_many_connections()
    start_step = partial(slurm_step, flags=job.step_flags, python=job.agent_python)
    starter = partial(SlurmStarter, job.hosts, start_step)
    history = RequeueState()

    def note(event: Event) -> None:
        print_event(event)
        history.note(event)

    try:
        supervisor = Supervisor(job.launch, note, starter)
    except ConfigurationError as error:
        _parser().error(str(error))
    stop_at_signals(supervisor.stop, job.launch.flags)
    if job.before_end_s is not None:
        threading.Thread(
            target=call_before_end,
            args=(os.environ['SLURM_JOB_ID'], job.before_end_s, partial(supervisor.stop, _ENDED)),
            name='slurm-end',
            daemon=True,
        ).start()
    code = supervisor.run()
    if code == EXIT_WHOLE_JOB and job.requeue:
        go_back(history, job.launch.flags)
    give_up_unwritten()
    return code


def _hosts() -> tuple[str, ...]:
    nodes = os.environ.get('SLURM_JOB_NODELIST')
    if nodes is None:
        raise ConfigurationError(
            'SLURM_JOB_NODELIST is not set: this runs in a batch script of Slurm; write one with '
            'moevement slurm --write-script FILE; moevement launch runs on one machine.'
        )
    return hostnames(nodes)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        'moevement slurm',
        usage='%(prog)s [flags] -- program [flags of the program]',
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    add_flags(parser, 'slurm')
    about = 'Write a batch script with this environment, to be edited and submitted, and exit.'
    parser.add_argument('--write-script', action=_WriteScript, metavar='FILE', help=about)
    return parser


class _WriteScript(argparse.Action):
    """Writes scripts/slurm_pretrain.sbatch and what it reads as one file, and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, path: Any, *flag: object
    ) -> None:
        script, common = (
            data(f'scripts/slurm_{name}').read_text('utf-8')
            for name in ('pretrain.sbatch', 'job.sh')
        )
        head, _, rest = script.partition('#SBATCH --job-name')
        about = f'# Trains under Slurm: sbatch {path} <flags of pretrain_gpt.py>\n'
        sites = head[head.index('# Many sites') :]
        functions = f'PYTHON=${{PYTHON:-{sys.executable}}}\n{common.partition("\n\n")[2]}'
        body = re.sub(r'export MOEVEMENT_HOME.*?exit 2; }\n', lambda _: functions, rest, flags=re.S)
        try:
            with open(path, 'x', encoding='utf-8') as file:
                file.write(f'#!/usr/bin/env bash\n{about}\n{sites}#SBATCH --job-name{body}')
        except OSError as error:
            parser.error(f'--write-script {path}: {error.strerror}; give another file')
        parser.exit(0, f'written: {path}; submit it with sbatch\n')


# Twice Slurm's default `SlurmdTimeout` (five minutes), after which it notices a lost node.
_TO_NOTICE_S = 600.0
_POLL_S = 5.0
# Seconds between two readings of the time limit, which may change while the job runs.
_LOOK_S = 60.0
_TRIES = 10
_PAUSE_S = 1.0
# Limit of Slurm's restart count for a job that has started no worker.
_MOST_RESTARTS = 10
_NO_COMMAND = 127


def hostnames(nodes: str) -> tuple[str, ...]:
    """Expand a Slurm node list such as `n[1-3]` into host names, in order.

    Raises `ConfigurationError` if `scontrol` is missing, or does not know these nodes.
    """
    asked = _ask('scontrol', 'show', 'hostnames', nodes)
    if asked.returncode != 0:
        raise ConfigurationError(
            f'scontrol show hostnames {nodes} failed ({asked.stderr.strip()}): the launcher needs '
            'the commands of Slurm in PATH, and the SLURM_JOB_NODELIST that Slurm has set.'
        )
    return tuple(asked.stdout.split())


def call_before_end(job: str, before_s: float, call: Callable[[], object]) -> None:
    """Invoke `call` `before_s` seconds before the job's time limit; never without a limit.

    Run this on a separate thread, since Slurm's controller may be slow. While the controller does
    not answer, its last answer is used.
    """
    end = math.inf
    while time.monotonic() < end - before_s:
        left_s = _seconds_left(job)
        if left_s is not None:
            end = time.monotonic() + left_s
        time.sleep(min(max(end - before_s - time.monotonic(), 0.0), _LOOK_S))
    call()


def wait_until_noticed(job: str, lost: Collection[str]) -> set[str]:
    """Wait until Slurm has removed lost nodes from the job, so that the job can be requeued.

    A job requeued earlier may get the lost nodes again, and Slurm 22.05 does not replace their
    resources, such as GPUs (the steps end with "Invalid generic resource"). The wait continues
    while the controller does not answer: it may be lost with the nodes, and could not requeue the
    job.

    Args:
        job: Slurm's job id.
        lost: lost hosts. The wait is bounded, as Slurm may consider some of them healthy.

    Returns:
        The lost hosts that Slurm considers healthy; none if its controller stays silent.
    """
    deadline = time.monotonic() + _TO_NOTICE_S
    while (sound := _still_has(job, lost)) != set() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return sound or set()


def requeue(job: str, excluded: Collection[str]) -> bool:
    """Put the job back into Slurm's queue.

    Args:
        job: Slurm's job id.
        excluded: hosts to exclude, in addition to those of the job's own `--exclude`.

    Returns:
        False if Slurm has refused, or its controller does not answer.
    """
    hosts = ','.join([*_excluded(job), *sorted(excluded)])
    # Slurm kills all processes of a job that it requeues, this command included.
    if not _insist('scontrol', 'requeue', job, killed=True):
        return False
    if excluded:  # Slurm changes this field of pending jobs only
        _insist('scontrol', 'update', f'JobId={job}', f'ExcNodeList={hosts}')
    return True


class RequeueState:
    """State of a job that decides about a requeue.

    `lost` are hosts without an agent, or with an unusable device; `has_begun` once a worker
    started.
    """

    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.has_begun = False

    def note(self, event: Event) -> None:
        match event:
            case NodeLost(host) | NodeMissing(host):
                self.lost.add(host)
            case NodeReady(host):
                self.lost.discard(host)
            case WorkerLaunched():
                self.has_begun = True


def go_back(state: RequeueState, flags: Sequence[str] = ()) -> None:
    """Requeue this job, unless too many requeues started no worker.

    Args:
        state: of the job.
        flags: of the program.
    """
    job = os.environ['SLURM_JOB_ID']
    run_id = unnamed_run_id(flags)
    restarts = int(os.environ.get('SLURM_RESTART_COUNT', '0'))
    hosts = ','.join(sorted(state.lost))
    if not state.has_begun and restarts >= _MOST_RESTARTS:
        say_of_launcher(
            f'Slurm has restarted the job {restarts} times, and again no worker could be started: '
            f'it does not go back to the queue. Repair {hosts}, or submit it with '
            f'--exclude={hosts}.'
        )
        return
    say_of_launcher('the job goes back to the queue of Slurm')
    sound = wait_until_noticed(job, state.lost)
    if sound:
        say_of_launcher(
            f'it does not get {",".join(sorted(sound))} again, which Slurm takes for sound; once '
            f'repaired: scontrol update JobId={job} ExcNodeList='
        )
    if not requeue(job, sound):
        named = '' if run_id is None else f' and --sparse-ckpt-run-id {run_id}'
        say_of_launcher(
            f'Slurm did not take it back: scontrol requeue {job} failed. Submit the job again with '
            f'the same flags{named}: it finds its windows.'
        )


def _still_has(job: str, lost: Collection[str]) -> set[str] | None:
    asked = _ask('squeue', '--noheader', f'--jobs={job}', '--format=%N')
    if asked.returncode != 0:
        return None
    nodes = asked.stdout.strip()
    return set(lost).intersection(hostnames(nodes) if nodes else ())


def _seconds_left(job: str) -> float | None:
    """Seconds to the job's time limit; infinity without a limit, None if Slurm does not answer."""
    shown = _ask('squeue', '--noheader', f'--jobs={job}', '--format=%L').stdout.strip()
    if shown == 'UNLIMITED':
        return math.inf
    found = re.fullmatch(r'(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)', shown)  # such as 1-02:03:04, 2:03
    if found is None:
        return None
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _excluded(job: str) -> list[str]:
    shown = _ask('scontrol', 'show', 'job', job).stdout
    return re.findall(r'\bExcNodeList=([^\s(]+)', shown)


def _insist(*command: str, killed: bool = False) -> bool:
    """Repeat a command until it succeeds, as a failover of Slurm's controller may be in progress.

    Args:
        command: the command.
        killed: a killed command has succeeded.

    Returns:
        False if it fails too often.
    """
    for _ in range(_TRIES):
        code = subprocess.run(command, check=False).returncode
        if code == 0 or (killed and code < 0):
            return True
        time.sleep(_PAUSE_S)
    return False


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:  # the command does not exist
        return subprocess.CompletedProcess(command, _NO_COMMAND, '', str(error))


if __name__ == '__main__':
    sys.exit(main())
