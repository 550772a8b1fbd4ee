# SPDX-License-Identifier: Apache-2.0
"""The part of the launcher on a node: starts the workers that it is told to, and hot spares.

It also watches the GPUs of the node, so that no rank is given to one that cannot be used.

`MOEVEMENT_SUPERVISOR` is where the supervisor listens and the secret of the job. Nothing that the
agent has started outlives it, and it does not outlive the connection.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from moevement_ext.devices import nvml
from moevement_ext.events import Event
from moevement_ext.launch import messages
from moevement_ext.launch.address import ADDRESS_VARIABLE, Address
from moevement_ext.launch.child import SpawnedChild
from moevement_ext.launch.config import LaunchConfig
from moevement_ext.launch.devices import Devices
from moevement_ext.launch.events import SpareReady
from moevement_ext.launch.link import Beats, Link
from moevement_ext.launch.loop import Loop
from moevement_ext.launch.output import Relay, last_lines, say_of_launcher
from moevement_ext.launch.spare_pool import SparePool
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.process.name_lookups import ask_again_soon
from moevement_ext.replicate.connection import Connection
from moevement_ext.replicate.greeting import introduce
from moevement_ext.replicate.secret import variables_of
from moevement_ext.store import flag
from moevement_ext.store.node_leader import NodeLeader

_CONNECT_S = 30.0
_TURN_S = 1.0
_NOT_STARTED = 1


class Agent:
    """Does what the supervisor says, until the connection to it ends.

    Args:
        link: to the supervisor.
        job: what is run.
        host: name of this node.
        devices: of this node.
        secret: of the launchers of the job.
    """

    def __init__(
        self,
        link: Link[messages.FromSupervisor],
        job: messages.Job,
        host: str,
        devices: Devices,
        secret: bytes,
    ) -> None:
        self._link = link
        self._host = host
        self._devices = devices
        log_dir = None if job.log_dir is None else Path(job.log_dir)
        self._config = LaunchConfig(job.program, tuple(job.flags), log_dir=log_dir)
        own = {'MOEVEMENT_NODE': host, **variables_of(secret)}
        self._environment = {**job.defaults, **os.environ, **own}
        self._loop = Loop()
        self._spares = SparePool(self._config, self._environment, self._loop, self._note_spare)
        self._spares_kept = 0
        self._leader: NodeLeader | None = None
        self._workers: dict[int, SpawnedChild] = {}
        self._relays: dict[int, Relay] = {}

    def run(self) -> None:
        """Return when the supervisor is gone; nothing runs here then."""
        self._loop.watch(self._link.fd, self._obey)
        self._loop.watch(self._devices.fd, self._tell_of_devices)
        self._devices.watch()
        beats = Beats(lambda: [self._link])
        try:
            while self._link.silent_s < messages.SILENT_S:
                self._loop.turn(_TURN_S)
        except OSError:
            pass  # the job is over, or the supervisor lost
        finally:
            self._spares.close()
            for worker in self._workers.values():
                worker.signal(signal.SIGKILL)
            for worker in self._workers.values():
                if worker.dies():
                    worker.reap()
            if self._leader is not None:
                self._leader.close()
            beats.close()

    def _obey(self) -> None:
        match self._link.receive():
            case messages.Start() as order:
                self._try_to_start(order)
            case messages.Signal(key, number) if key in self._workers:
                self._workers[key].signal(number)
            case messages.KeepSpares(count):
                for _ in range(count - self._spares_kept):
                    self._spares.start()
                self._spares_kept = max(count, self._spares_kept)
            case messages.Vanish(directory, run_id):
                self._vanish(NodeStore(Path(directory), run_id, self._host))

    def _vanish(self, memory: NodeStore) -> None:
        """Nobody is told; Linux kills what has been started here."""
        for worker in self._workers.values():
            worker.signal(signal.SIGKILL)
        for worker in self._workers.values():
            worker.ended_well()  # or it might write again what is deleted
        memory.remove()
        os.kill(os.getpid(), signal.SIGKILL)

    def _try_to_start(self, order: messages.Start) -> None:
        """A log that cannot be opened, or no process left, is no reason to end the others."""
        try:
            started = self._start(order)
        except OSError as error:
            why = f'cannot be started on {self._host}: {error}'
            self._link.send(messages.Ended(order.key, _NOT_STARTED, [why]))
            return
        self._link.send(started)

    def _start(self, order: messages.Start) -> messages.Started:
        log = self._config.log_of(order.rank)
        variables = {**order.variables, **self._leading(order)}
        spare = self._spares.take(variables, log, refill=False)
        worker = spare or self._new_process(variables, log)
        self._workers[order.key] = worker
        if log is None:
            assert worker.output is not None
            relay = Relay(worker.output, f'[rank {order.rank}] ', _ignore)
            self._relays[order.key] = relay
            self._loop.watch(relay.fd, partial(self._pump, relay))
        self._loop.watch(worker.death, partial(self._ended, order.key, log))
        return messages.Started(order.key, worker.pid, was_spare=spare is not None)

    def _leading(self, order: messages.Start) -> dict[str, str]:
        """What lets a worker find the leader of this node, which leads to where they meet."""
        launchers = order.variables['MASTER_ADDR'], int(order.variables['MASTER_PORT'])
        store = flag.address(self._config.flags) or launchers
        if self._leader is None or self._leader.store != store:  # when all start again
            if self._leader is not None:
                self._leader.close()
            self._leader = NodeLeader(*store)
        return self._leader.variables

    def _new_process(self, variables: dict[str, str], log: Path | None) -> SpawnedChild:
        start = partial(
            SpawnedChild,
            [self._config.program, *self._config.flags],
            {**self._environment, **variables},
            stderr=subprocess.STDOUT,
        )
        if log is None:
            return start(stdout=subprocess.PIPE)
        with log.open('ab') as output:
            return start(stdout=output)

    def _ended(self, key: int, log: Path | None) -> None:
        worker = self._workers.pop(key)
        self._loop.forget(worker.death)
        code = worker.reap()
        relay = self._relays.pop(key, None)
        if relay is not None:
            self._loop.forget(relay.fd)
            relay.finish()
        worker.close()
        lines: list[str] = []
        with suppress(OSError):
            lines = last_lines(log) if log is not None else []
        if code != 0:  # not back to a device that may have been the reason
            self._tell_of_devices()
        self._link.send(messages.Ended(key, code, relay.last_lines if relay else lines))

    def _pump(self, relay: Relay) -> None:
        if not relay.pump():
            self._loop.forget(relay.fd)

    def _note_spare(self, event: Event) -> None:
        if isinstance(event, SpareReady):
            self._link.send(messages.SpareIsReady(event.pid))
        else:
            say_of_launcher(event)

    def _tell_of_devices(self) -> None:
        for message in self._devices.take():
            self._link.send(message)


def _ignore(line: str) -> None:
    """Nobody looks for anything in what a worker prints."""


def connect(
    address: Address, host: str, devices: Sequence[messages.DevicesFail]
) -> Link[messages.FromSupervisor]:
    """Meet the supervisor.

    Args:
        address: where it listens.
        host: name of this node.
        devices: what is wrong with some.

    Raises:
        OSError: it is not there, or not that of this job.
    """
    sock = socket.create_connection((address.host, address.port), _CONNECT_S)
    connection = Connection(sock)
    connection.set_deadline(_CONNECT_S)
    refused = introduce(connection, address.secret)
    if refused is not None:
        raise ConnectionError(refused)
    link = Link(sock, messages.FROM_SUPERVISOR)
    trouble = '; '.join(one.trouble for one in devices)
    link.send(messages.Here(host, trouble, all(one.usable for one in devices)))
    return link


def main() -> None:
    """Body of the process."""
    ask_again_soon()
    # Slurm sends them to workers and supervisor, too, of whom the latter decides what they mean.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    address = Address.parse(os.environ.pop(ADDRESS_VARIABLE))
    host = os.environ['SLURMD_NODENAME']
    devices = Devices(nvml.of_this_node())
    devices.look()
    try:
        link = connect(address, host, devices.take())
        job = link.receive()
    except OSError as error:
        sys.exit(f'the supervisor at {address.host}:{address.port} is not reached: {error}')
    assert isinstance(job, messages.Job)
    Agent(link, job, host, devices, address.secret).run()


if __name__ == '__main__':
    main()
