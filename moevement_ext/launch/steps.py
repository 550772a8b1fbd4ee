# SPDX-License-Identifier: Apache-2.0
"""Steps of the Slurm job: one a node, in which the agent of that node runs."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from moevement_ext.launch.child import bound
from moevement_ext.launch.link import ADDRESS_VARIABLE, Address

AGENT = ('-m', 'moevement_ext.launch.agent')
_SHARES = (
    'SLURM_GPUS',
    'SLURM_GPUS_PER_SOCKET',
    'SLURM_GPUS_PER_TASK',
    'SLURM_NTASKS_PER_GPU',
    'SLURM_TRES_PER_TASK',
)
"""How sbatch was told to deal GPUs out to tasks; an agent, one task, has all those of its node."""


class Step:
    """One attempt to have an agent on a node.

    Args:
        command: that runs as long as the agent does.
        environment: all of it.

    Attributes:
        since: when it was started, in seconds of the monotonic clock.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.since = time.monotonic()
        self._process = subprocess.Popen(
            bound(command), env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def ended(self) -> int | None:
        """Exit status if it is over; which says little: a node that was lost has 0, too."""
        return self._process.poll()

    def cancel(self) -> None:
        """Ask for its end."""
        self._process.terminate()

    def close(self, timeout_s: float) -> None:
        """Wait for its end, at most so long, and kill it then."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


StartStep = Callable[[str, Address], Step]
"""Starts the agent of a host, which is to connect to an address."""


def slurm_step(
    host: str,
    address: Address,
    flags: Sequence[str] = (),
    python: Sequence[str] = (sys.executable,),
) -> Step:
    """A step on one node of the allocation, with all that the job has there.

    That other steps, or nodes, fail does not concern it.

    Args:
        host: the node.
        address: to which its agent connects.
        flags: more of them for `srun`, such as the image to run in.
        python: words that run Python on the node, such as that of an image.
    """
    command = ['srun', '--no-kill', '--overlap', '--nodes=1', '--ntasks=1', f'--nodelist={host}']
    command += ['--kill-on-bad-exit=0', '--mem=0', '--export=ALL']  # not as sbatch was told
    environment = {name: value for name, value in os.environ.items() if name not in _SHARES}
    if len(environment) < len(os.environ) and 'SLURM_GPUS_ON_NODE' in os.environ:
        command += [f'--gpus-per-node={os.environ["SLURM_GPUS_ON_NODE"]}']
    if 'SLURM_CPUS_PER_TASK' in os.environ:  # srun has not read it since Slurm 22.05
        command += [f'--cpus-per-task={int(os.environ["SLURM_CPUS_PER_TASK"]) * _tasks()}']
    return Step(
        [*command, *flags, *python, *AGENT], {**environment, ADDRESS_VARIABLE: str(address)}
    )


def _tasks() -> int:
    """Those of a node, as sbatch was told; the fewest, where nodes differ (`8(x3),4`)."""
    nodes = os.environ.get('SLURM_TASKS_PER_NODE', '1').split(',')
    return min(int(node.partition('(')[0]) for node in nodes)
