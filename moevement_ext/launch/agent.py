# SPDX-License-Identifier: Apache-2.0
"""The launcher's process on a node: starts hot spares and the workers that the supervisor orders.

The agent also watches the GPUs of the node, so that no rank runs on an unusable GPU.
`MOEVEMENT_SUPERVISOR` holds the address of the supervisor and the secret of the job. Processes
started by the agent do not outlive the agent, and the agent does not outlive the connection.
"""

import contextlib
import os
import queue
import signal
import socket
import sys
from collections.abc import Sequence

from moevement_ext.events import Event
from moevement_ext.launch import messages
from moevement_ext.launch.child import FdLoop
from moevement_ext.launch.launcher_events import line_of
from moevement_ext.launch.link import ADDRESS_VARIABLE, Address, Beats, Link
from moevement_ext.launch.machine import NODE, Machine
from moevement_ext.launch.output import say_from_handler
from moevement_ext.logger import logger_of
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.secret import introduce, variables_of
from moevement_ext.system import nvml
from moevement_ext.system.leaving import ASKING
from moevement_ext.system.nvml import DeviceWatch
from moevement_ext.system.process_setup import ask_again_soon

logger = logger_of(__name__)

_CONNECT_S = 30.0
_TURN_S = 1.0


class Devices:
    """Collects faults of the node's GPUs from `source`: at construction, and from `watch` on.

    `fd` is readable when there are new faults.
    """

    def __init__(self, source: nvml.Nvml | None) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._found: queue.SimpleQueue[nvml.Finding] = queue.SimpleQueue()
        self._watch = None if source is None else DeviceWatch(source, self._add)
        if self._watch is not None:
            self._watch.poll()

    def watch(self) -> None:
        if self._watch is not None:
            self._watch.start()

    def take(self) -> list[messages.DevicesFail]:
        """The findings since the last call; any thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        found = [self._found.get() for _ in range(self._found.qsize())]
        return [messages.DevicesFail(f'GPU {one}') for one in found]

    def _add(self, finding: nvml.Finding) -> None:
        self._found.put(finding)
        os.eventfd_write(self.fd, 1)


class Agent:
    """Carries out the supervisor's orders until the connection ends."""

    def __init__(
        self,
        link: Link[messages.FromSupervisor],
        job: messages.Program,
        host: str,
        devices: Devices,
        secret: bytes,
    ) -> None:
        self._link = link
        self._devices = devices
        self._loop = FdLoop()
        own = {NODE: host, **variables_of(secret)}
        self._machine = Machine(job, own, self._loop, self._send, self._report)

    def run(self) -> None:
        """Serve until the connection ends; return when no process of the job runs on this node."""
        self._loop.watch(self._link.fd, self._obey)
        self._loop.watch(self._devices.fd, self._send_device_faults)
        self._devices.watch()
        beats = Beats(lambda: [self._link])
        try:
            while self._link.silent_s < messages.SILENT_S:
                self._loop.turn(_TURN_S)
                self._machine.report_kills()
        except OSError:
            pass  # the job is over, or the supervisor is lost
        finally:
            self._machine.close()
            beats.close()

    def _obey(self) -> None:
        message = self._link.receive()
        self._machine.obey(message)
        if isinstance(message, messages.SimulateNodeLoss):  # the supervisor must detect the loss
            os.kill(os.getpid(), signal.SIGKILL)

    def _send(self, message: messages.FromAgent) -> None:
        if isinstance(message, messages.Ended) and message.code != 0:
            self._send_device_faults()  # first, so that the rank does not restart on a broken GPU
        self._link.send(message)

    def _report(self, event: Event) -> None:
        self._link.send(messages.Happened(line_of(event)))

    def _send_device_faults(self) -> None:
        for message in self._devices.take():
            self._link.send(message)


def connect(
    address: Address, host: str, devices: Sequence[messages.DevicesFail]
) -> Link[messages.FromSupervisor]:
    """Connect to the supervisor and introduce this node with the faults of its GPUs.

    Raises `OSError` if no supervisor answers, or it belongs to another job.
    """
    sock = socket.create_connection((address.host, address.port), _CONNECT_S)
    connection = Connection(sock)
    connection.set_deadline(_CONNECT_S)
    refused = introduce(connection, address.secret)
    if refused is not None:
        raise ConnectionError(refused)
    link = Link(sock, messages.FROM_SUPERVISOR)
    trouble = '; '.join(one.trouble for one in devices)
    link.send(messages.Here(host, trouble))
    return link


def enter(directory: str) -> None:
    """Change to the launcher's directory; containers start in another one.

    Without that directory this process stays where it is. A worker that then does not find its
    program ends with Python's exit status, which is that of a user error.
    """
    try:
        os.chdir(directory)
    except OSError as error:
        logger.warning(
            '%s: relative paths are not found, as this node, or the image of the agent, lacks the '
            'directory of the launcher; mount it there under the same path',
            error,
        )


def main() -> None:
    ask_again_soon()
    # Slurm sends signals to all processes; the supervisor alone decides what they mean.
    for number in ASKING:
        signal.signal(number, _leave_to_supervisor)
    address = Address.parse(os.environ.pop(ADDRESS_VARIABLE))
    host = os.environ['SLURMD_NODENAME']
    devices = Devices(nvml.of_this_node())
    try:
        link = connect(address, host, devices.take())
        job = link.receive()
    except OSError as error:
        sys.exit(f'the supervisor at {address.host}:{address.port} is unreachable: {error}')
    assert isinstance(job, messages.Program)
    enter(job.directory)
    Agent(link, job, host, devices, address.secret).run()


def _leave_to_supervisor(number: int, frame: object) -> None:
    """Log that the signal has no effect here, in case only the steps received it."""
    name = signal.Signals(number).name
    say_from_handler(
        f'{name} has no effect on a step; to end the job, signal its batch script: scancel --batch '
        f'--signal={name.removeprefix("SIG")} {os.environ.get("SLURM_JOB_ID", "JOB")}'
    )


if __name__ == '__main__':
    main()
