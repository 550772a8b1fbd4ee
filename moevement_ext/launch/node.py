# SPDX-License-Identifier: Apache-2.0
"""The supervisor's view of a host of the allocation, and the step of Slurm for its agent."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from moevement_ext.launch.child import FdLoop, bound
from moevement_ext.launch.link import ADDRESS_VARIABLE, Address, Link
from moevement_ext.launch.messages import SILENT_S, FromAgent

# Limit for a step to start its agent: before that, Slurm may import an image of tens of GB.
_TO_CONNECT_S = 900.0
_FIRST_PAUSE_S = 30.0
_LAST_PAUSE_S = 3600.0


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
        # Tasks per node as given to sbatch; the minimum where nodes differ (`8(x3),4`).
        nodes = os.environ.get('SLURM_TASKS_PER_NODE', '1').split(',')
        tasks = min(int(node.partition('(')[0]) for node in nodes)
        command += [f'--cpus-per-task={int(os.environ["SLURM_CPUS_PER_TASK"]) * tasks}']
    return Step(
        [*command, *flags, *python, *AGENT], {**environment, ADDRESS_VARIABLE: str(address)}
    )


@dataclass(eq=False)
class Node:
    """A host: its step, and the connection to its agent.

    Args:
        host: name of the host.
        loop: calls this object when the agent sends a message.
        on_message: called with each message of the agent.
        on_lost: called with the reason when the agent is lost.
        on_missed: called with the reason when no agent connected.

    Attributes:
        is_hot: the agent has the order to keep hot spares.
        has_imported: a hot spare is ready there, or could not be started.
        tried: start of the last step here, in seconds of the monotonic clock.
        why: reason why the host has no agent.
        broken: the fault of an unusable device, or the reason why the host was given up. Remains
            set for the rest of the job, as no message reports a repair.
    """

    host: str
    _loop: FdLoop
    _on_message: Callable[['Node', FromAgent], None]
    _on_lost: Callable[['Node', str], None]
    _on_missed: Callable[['Node', str], None]

    def __post_init__(self) -> None:
        self.link: Link[FromAgent] | None = None
        self.is_hot = False
        self.has_imported = False
        self.tried = 0.0
        self.why = 'not started yet'
        self.broken = ''
        self._step: Step | None = None
        self._left: list[Step] = []
        self._pause_s = _FIRST_PAUSE_S

    @property
    def is_usable(self) -> bool:
        return self.link is not None and not self.broken

    @property
    def is_coming(self) -> bool:
        """True if a step was started here and its agent may still connect."""
        return self.link is None and self._step is not None

    @property
    def is_due(self) -> bool:
        """True if the host has no agent and a new attempt is due."""
        waits = self.link is None and self._step is None and not self.broken
        return waits and time.monotonic() >= self.tried + self._pause_s

    def begin(self, step: Step) -> None:
        self.tried = step.since
        self._step = step

    def cannot_begin(self, why: str) -> None:
        """Record a failed attempt; the pause before the next attempt grows."""
        self.tried = time.monotonic()
        self._miss(why)

    def connected(self, link: Link[FromAgent]) -> None:
        self.link = link
        self.is_hot = self.has_imported = False
        self._pause_s = _FIRST_PAUSE_S
        self._loop.watch(link.fd, self.handle_message)

    def poll(self) -> None:
        self._left = [step for step in self._left if step.ended() is None]
        if self.link is not None and self.link.silent_s > SILENT_S:
            self.lose(f'no message for {SILENT_S:.0f} s')
        if self.is_coming:
            self._check_step()

    def send(self, message: msgspec.Struct) -> None:
        if self.link is not None:
            link = self.link
            self._attempt(lambda: link.send(message))

    def handle_message(self) -> None:
        if self.link is not None:
            self._attempt(self._receive)

    def lose(self, why: str) -> None:
        """Drop the agent; a later attempt may start another."""
        self.why = why
        self.disconnect()
        self._abandon_step()
        self._on_lost(self, why)

    def give_up(self, why: str) -> None:
        self.broken = why
        self.lose(why)

    def disconnect(self) -> None:
        """Close the connection, which ends the agent."""
        if self.link is not None:
            self._loop.forget(self.link.fd)
            self.link.close()
            self.link = None

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the end of the step; call this after `disconnect`."""
        if self._step is not None:
            self._step.close(timeout_s)
        for step in self._left:
            step.close(0.0)

    def _receive(self) -> None:
        assert self.link is not None
        self._on_message(self, self.link.receive())

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self.lose(f'the connection to its agent is lost ({error})')

    def _check_step(self) -> None:
        assert self._step is not None
        status = self._step.ended()
        if status is not None:
            why = f'its step ended with status {status} before its agent connected'
        elif time.monotonic() > self._step.since + _TO_CONNECT_S:
            why = (
                f'its agent did not connect within {_TO_CONNECT_S / 60:.0f} minutes, in which '
                'Slurm must also import the image of --step-flags'
            )
        else:
            return
        self._abandon_step()
        self._miss(why)

    def _miss(self, why: str) -> None:
        self.why = why
        self._on_missed(self, why)
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    def _abandon_step(self) -> None:
        """Cancel the step without waiting, as it ends only once Slurm notices the lost node."""
        if self._step is not None:
            self._step.cancel()
            self._left.append(self._step)
            self._step = None
