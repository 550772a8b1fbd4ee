# SPDX-License-Identifier: Apache-2.0
"""torchrun's agent, as `moevement torchrun` changes it, and as torchrun's plug-in does.

    torchrun --rdzv-backend moevement --rdzv-endpoint HOST:PORT --nnodes 4:5 ... pretrain_gpt.py ...

Four nodes train, each at a *seat*. The fifth stands by, until a node is silent, and takes its seat.
The store is one of `moevement store`, else the agent on HOST serves it. Checked against torch 2.15.
"""

import os
import secrets
import signal
import sys
import threading
import time
from argparse import Namespace
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher import api
from torch.distributed.run import run

from moevement_ext.config import COORDINATOR, ConfigurationError, node_name
from moevement_ext.coordinator.keeper import Keeper
from moevement_ext.errors import EXIT_OTHER_BITS, EXIT_USER_ERROR, UserError
from moevement_ext.launch.launch_config import STORE_BACKEND, split_address
from moevement_ext.launch.torchrun_workers import a_death, fork_workers
from moevement_ext.memory.window.settings import digest_of
from moevement_ext.replicate import secret
from moevement_ext.store import connect, listen
from moevement_ext.system import leaving
from moevement_ext.system.process_setup import ask_again_soon

_TO_MEET_S = 600
_SIGNALS = 'TORCHELASTIC_SIGNALS_TO_HANDLE'


_BEAT_S, _SILENT_S = 1.0, 10.0  # a standby node takes the seat of one silent for so long


class OutsideStore(RendezvousHandler):
    """Rendezvous handler of an agent: torch's static rendezvous, but never the store's server.

    `rank` is that of this node among `nodes`, `run_id` is `--rdzv-id`; `timeout` limits the
    rendezvous of all agents and answers of the store.
    """

    def __init__(
        self, host: str, port: int, rank: int, nodes: int, run_id: str, timeout: timedelta
    ) -> None:
        self._host, self._port = host, port
        self._rank = rank
        self._nodes = nodes
        self._run_id = run_id
        self._timeout = timeout
        # An agent with another command is of another job, and takes no place of this one's.
        self._key = f'agent/{rank}/{digest_of(sys.argv)}'
        self._token = secrets.token_hex(8)
        self._began = False

    @classmethod
    def create(cls, params: RendezvousParameters) -> 'OutsideStore':
        host, port = split_address(params.endpoint)
        rank, seconds = params.get_as_int('rank', -1), params.get_as_int('timeout', _TO_MEET_S)
        assert rank is not None and seconds is not None
        timeout = timedelta(seconds=seconds)
        return cls(host, port, rank, params.min_nodes, params.run_id, timeout)

    def next_rendezvous(self) -> RendezvousInfo:
        """Connect to the store, again before each start of workers, as the store may be new.

        Keys of agents with another number of nodes are not read. Raises `ConfigurationError` if
        another agent has taken this one's place since its first call.
        """
        store = self._connect()
        self._take_place(store)
        at = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(store, self._rank, self._nodes, at)

    def _connect(self) -> Store:
        server = connect(self._host, self._port, self._timeout)
        return PrefixStore(f'agents/{self._run_id}/{self._nodes}', server)

    def _take_place(self, store: Store) -> None:
        """Claim this node rank for the newest agent; workers of two would fence each other out."""
        if not self._began:
            self._began = True
            store.set(self._key, self._token)
        elif store.compare_set(self._key, '', self._token).decode() != self._token:
            raise ConfigurationError(
                f'--node-rank {self._rank}: another agent was started with it, and this one ends. '
                'Start one agent for each node rank.'
            )

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return STORE_BACKEND

    def num_nodes_waiting(self) -> int:
        """Return 0, as a new agent takes the place of a lost one."""
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Does nothing."""

    def shutdown(self) -> bool:
        """Does nothing: the store outlives the agents."""
        return True


class Seats(OutsideStore):
    """Rendezvous handler of the plug-in: nodes take free seats, and then those of silent nodes."""

    def __init__(self, *of_node: Any) -> None:
        super().__init__(*of_node)
        self._token = f'{node_name()}/{self._token}'
        self._server: TCPStore | None = None
        with suppress(ConfigurationError):  # it is elsewhere, or served already
            listening = listen(self._host, self._port)
            address, port = listening.getsockname()[:2]
            self._server = TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a seat, the own one if this node has one.

        Raises `RendezvousGracefulExitError` if the job ends meanwhile.
        """
        while True:
            with leaving.in_one_line():
                store = self._connect()
            with suppress(DistError):  # the store is lost; another one may take its place
                self._rank = self._seat(store)
                break
        if not self._began:
            self._began = True
            threading.Thread(target=self._beat, name='seat', daemon=True).start()
        at = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(store, self._rank, self._nodes, at)

    def get_backend(self) -> str:
        return 'moevement'

    def _seat(self, store: Store) -> int:
        seen: dict[str, tuple[int, float]] = {}
        ended = store.add('ended', 0)
        seats = sorted(range(self._nodes), key=lambda seat: seat != self._rank)
        while store.add('ended', 0) == ended:
            for seat in seats:
                holder = store.compare_set(f'seat/{seat}', '', self._token).decode()
                if holder != self._token and self._is_free(store, holder, seen):
                    holder = store.compare_set(f'seat/{seat}', holder, self._token).decode()
                if holder == self._token:
                    return seat
            time.sleep(_BEAT_S)
        raise RendezvousGracefulExitError('the job has ended; this node stood by')

    def _is_free(self, store: Store, holder: str, seen: dict[str, tuple[int, float]]) -> bool:
        """True if the holder is silent, for less long if it was an agent of this node."""
        beats, now = store.add(f'beats/{holder}', 0), time.monotonic()
        if holder not in seen or seen[holder][0] != beats:
            seen[holder] = beats, now
        same_node = holder.partition('/')[0] == self._token.partition('/')[0]
        return now - seen[holder][1] > (3 * _BEAT_S if same_node else _SILENT_S)

    def _beat(self) -> None:
        while True:
            with suppress(DistError, ConfigurationError):
                store = self._connect()
                while store.add(f'beats/{self._token}', 1):
                    time.sleep(_BEAT_S)
            time.sleep(_BEAT_S)

    def shutdown(self) -> bool:
        """Let nodes go that stand by."""
        with suppress(DistError, ConfigurationError):
            self._connect().add('ended', 1)
            if self._server is not None:
                time.sleep(2 * _BEAT_S)  # they still ask
        return True


def take_seat(params: RendezvousParameters) -> RendezvousHandler:
    """Make this agent's rendezvous for torchrun, which has made no agent yet."""
    ask_again_soon()
    asking = {*leaving.ASKING, leaving.listened_for(sys.argv)}
    names = os.environ.get(_SIGNALS, '').split(',') + [one.name for one in sorted(asking)]
    os.environ[_SIGNALS] = ','.join(dict.fromkeys(filter(None, names)))
    _change_agent()
    with leaving.in_one_line():
        return Seats.create(params)


def _change_agent() -> None:
    api.LocalElasticAgent = _RestartingAgent  # type: ignore[attr-defined]
    fork_workers()


class _RestartingAgent(LocalElasticAgent):
    """Torch's agent, except that a user error, or other bits, end the job without a restart.

    On any signal to end, the agent sends its workers their exit signal. It sees at once that a
    signal has killed a fork. That of the first node keeps the coordinator.
    """

    def __init__(self, spec: WorkerSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(spec, *args, **kwargs)
        self._interval_s, spec.monitor_interval = spec.monitor_interval, 0.0  # waits below
        self._keeper: Keeper | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if worker_group.group_rank == 0 and self._keeper is None:
            with leaving.in_one_line():
                self._keeper = _keep_coordinator(nodes=worker_group.group_world_size or 1)
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if isinstance(sys.exception(), SignalException):  # otherwise the workers restart
            death_sig = leaving.listened_for(self._worker_group.spec.args)
        super()._shutdown(death_sig, timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers every `--monitor-interval` seconds, or when one dies.

        Exits if a worker ended because of a user error before any restart. A
        user error exists from the start; after a restart the same exit status may have
        another cause, such as too little memory on one node.
        """
        a_death.wait(self._interval_s)
        a_death.clear()
        result: RunResult = super()._monitor_workers(worker_group)
        if any(failure.exitcode == EXIT_OTHER_BITS for failure in result.failures.values()):
            sys.exit(EXIT_OTHER_BITS)  # its log says why
        if self._remaining_restarts == worker_group.spec.max_restarts:
            for rank, failure in result.failures.items():
                if failure.exitcode == EXIT_USER_ERROR:
                    with leaving.in_one_line():
                        raise UserError(
                            f'rank {rank} (pid {failure.pid}) ended with exit status '
                            f'{EXIT_USER_ERROR}: it refuses what it was started with.'
                        )
        return result


def _keep_coordinator(nodes: int) -> Keeper:
    """Keep the coordinator for the workers of all nodes, and tell rank 0, which is on this node."""
    if nodes == 1 and secret.given_in(os.environ) is None:
        os.environ |= secret.variables()
    keeper = Keeper('', secret.of_coordinator(secret.given_in(os.environ)))
    os.environ[COORDINATOR] = f':{keeper.address[1]}'
    return keeper


@record
def run_agent(args: Namespace) -> None:
    """Run the job of these arguments of torchrun."""
    with leaving.in_one_line():
        rendezvous_handler_registry.register(STORE_BACKEND, OutsideStore.create)
        _change_agent()
        run(args)
