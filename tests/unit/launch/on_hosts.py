# SPDX-License-Identifier: Apache-2.0
"""Small jobs under the launcher for Slurm: real agents on fictitious hosts, without Slurm.

A step runs the agent directly instead of `srun`.
"""

import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moevement_ext.launch import messages
from moevement_ext.launch.hosts import SlurmStarter
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.launch.launcher_events import NodeLost, NodeSeated
from moevement_ext.launch.link import ADDRESS_VARIABLE, Address, Link
from moevement_ext.launch.node import AGENT, Step
from moevement_ext.launch.supervisor import Supervisor
from moevement_ext.membership.mailbox import write_survivors
from tests.unit.launch.conftest import Job
from tests.unit.system.conftest import DRIVER, Devices


def connected() -> tuple[Link[messages.FromSupervisor], Link[messages.FromAgent]]:
    """Both ends of a connection: that of an agent, and that of its supervisor."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return Link(here, messages.FROM_SUPERVISOR), Link(there, messages.FROM_AGENT)


class SlurmJob(Job):
    """A job on the hosts a, b, ...

    Attributes:
        steps: all started steps, by host.
        dead: hosts on which a step fails.
        wrapper: command that runs the agents.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.steps: dict[str, list[Step]] = {}
        self.dead: set[str] = set()
        self.wrapper: list[str] = []

    def on_hosts(
        self, hosts: Sequence[str], *flags: str, survive: bool = True, **settings: Any
    ) -> Supervisor:
        """A job on the first `nodes` of the hosts; the others are spare. `survive`: as in `Job`."""
        config = LaunchConfig(str(self.program), flags, **settings)
        starter = partial(SlurmStarter, hosts, self._start_step)
        self.running = Supervisor(config, self._note, starter)
        if survive:
            write_survivors(self.mailbox)
        return self.running

    def seated(self) -> list[tuple[str, int]]:
        return [(event.host, event.node) for event in self.seen(NodeSeated)]

    def lost(self) -> list[tuple[str, int | None]]:
        return [(event.host, event.node) for event in self.seen(NodeLost)]

    def lose(self, host: str) -> None:
        """Kill the agent of a host; Linux kills its workers. Further steps on the host fail."""
        self.dead.add(host)
        self.steps[host][-1]._process.kill()

    def devices(self, host: str) -> Devices:
        """The GPUs of a host, initially one healthy GPU."""
        folder = self.folder / f'devices-{host}'
        folder.mkdir()
        devices = Devices(folder)
        devices.set('GPU-0')
        return devices

    def _start_step(self, host: str, address: Address) -> Step:
        environment = {**os.environ, ADDRESS_VARIABLE: str(address), 'SLURMD_NODENAME': host}
        devices = self.folder / f'devices-{host}'
        if devices.exists():
            environment['MOEVEMENT_TEST_DEVICES'] = str(devices)
            environment['PYTHONPATH'] = f'{DRIVER}{os.pathsep}{os.environ.get("PYTHONPATH", "")}'
            del environment['CUDA_VISIBLE_DEVICES']
        command = ['false'] if host in self.dead else [*self.wrapper, sys.executable, *AGENT]
        step = Step(command, environment)
        self.steps.setdefault(host, []).append(step)
        return step
