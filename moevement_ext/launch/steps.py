# SPDX-License-Identifier: Apache-2.0
"""Steps of the Slurm job: one step per node runs the node's agent."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from moevement_ext.launch.child import bound
from moevement_ext.launch.link import ADDRESS_VARIABLE, Address

AGENT = ('-m', 'moevement_ext.launch.agent')
# sbatch's settings of GPUs per task, and of bindings. Removed, as an agent is one task with all
# GPUs of its node.
_SHARES = (
    'SLURM_GPUS',
    'SLURM_GPUS_PER_SOCKET',
    'SLURM_GPUS_PER_TASK',
    'SLURM_GPU_BIND',
    'SLURM_NTASKS_PER_GPU',
    'SLURM_TRES_BIND',
    'SLURM_TRES_PER_TASK',
)


class Step:
    """One attempt to run an agent on a node, by a command that runs as long as the agent.

    `since` is the start of the step, in seconds of the monotonic clock.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.since = time.monotonic()
        self._process = subprocess.Popen(
            bound(command), env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def ended(self) -> int | None:
        """Exit status of an ended step. Not conclusive: the step of a lost node has status 0."""
        return self._process.poll()

    def cancel(self) -> None:
        self._process.terminate()

    def close(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


StartStep = Callable[[str, Address], Step]
"""Starts the agent of the given host, which connects to the given address."""


def slurm_step(
    host: str,
    address: Address,
    flags: Sequence[str] = (),
    python: Sequence[str] = (sys.executable,),
) -> Step:
    """Start a step on one node of the allocation, with all the job's resources there.

    Failures of other steps or nodes do not end the step. `flags` are additional flags of
    `srun`, such as the container image; `python` is the command that runs Python on the node.
    """
    command = ['srun', '--no-kill', '--overlap', '--nodes=1', '--ntasks=1', f'--nodelist={host}']
    command += ['--kill-on-bad-exit=0', '--mem=0', '--export=ALL']  # overrides sbatch's settings
    environment = {name: value for name, value in os.environ.items() if name not in _SHARES}
    if len(environment) < len(os.environ) and 'SLURM_GPUS_ON_NODE' in os.environ:
        command += [f'--gpus-per-node={os.environ["SLURM_GPUS_ON_NODE"]}']
    if 'SLURM_CPUS_PER_TASK' in os.environ:  # srun ignores this variable since Slurm 22.05
        command += [f'--cpus-per-task={int(os.environ["SLURM_CPUS_PER_TASK"]) * _tasks()}']
    return Step(
        [*command, *flags, *python, *AGENT], {**environment, ADDRESS_VARIABLE: str(address)}
    )


def _tasks() -> int:
    """Tasks per node as given to sbatch; the minimum where nodes differ (`8(x3),4`)."""
    nodes = os.environ.get('SLURM_TASKS_PER_NODE', '1').split(',')
    return min(int(node.partition('(')[0]) for node in nodes)
