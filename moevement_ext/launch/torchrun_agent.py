# SPDX-License-Identifier: Apache-2.0
"""torchrun's agent, as `moevement torchrun` changes it. Checked against torch 2.15."""

import secrets
import signal
import sys
from argparse import Namespace
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher import api
from torch.distributed.run import run

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import EXIT_OTHER_BITS, EXIT_USER_ERROR, UserError
from moevement_ext.launch.launch_config import STORE_BACKEND, split_address
from moevement_ext.launch.torchrun_workers import a_death, fork_workers
from moevement_ext.memory.window.settings import digest_of
from moevement_ext.store.server import connect
from moevement_ext.system import leaving

_TO_MEET_S = 600


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
        rank, seconds = params.get_as_int('rank'), params.get_as_int('timeout', _TO_MEET_S)
        assert rank is not None and seconds is not None
        timeout = timedelta(seconds=seconds)
        return cls(host, port, rank, params.max_nodes, params.run_id, timeout)

    def next_rendezvous(self) -> RendezvousInfo:
        """Connect to the store, again before each start of workers, as the store may be new.

        Keys of agents with another number of nodes are not read. Raises `ConfigurationError` if
        another agent has taken this one's place since its first call.
        """
        server = connect(self._host, self._port, self._timeout)
        store = PrefixStore(f'agents/{self._run_id}/{self._nodes}', server)
        self._take_place(store)
        at = RendezvousStoreInfo(self._host, self._port)
        return RendezvousInfo(store, self._rank, self._nodes, at)

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


class _RestartingAgent(LocalElasticAgent):
    """Torch's agent, except that a user error, or other bits, end the job without a restart.

    On any signal to end, the agent sends its workers their exit signal. It sees at once that a
    signal has killed a fork.
    """

    def __init__(self, spec: WorkerSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(spec, *args, **kwargs)
        self._interval_s, spec.monitor_interval = spec.monitor_interval, 0.0  # waits below

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if isinstance(sys.exception(), SignalException):  # otherwise the workers restart
            death_sig = leaving.listened_for(self._worker_group.spec.args)
        super()._shutdown(death_sig, timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers every `--monitor-interval` seconds, or when one dies.

        Raises `UserError` if a worker ended because of a user error before any restart. A
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
                    raise UserError(
                        f'rank {rank} (pid {failure.pid}) ended with exit status '
                        f'{EXIT_USER_ERROR}: it refuses what it was started with.'
                    )
        return result


@record
def run_agent(args: Namespace) -> None:
    """Run the job of these arguments of torchrun."""
    with leaving.in_one_line():
        rendezvous_handler_registry.register(STORE_BACKEND, OutsideStore.create)
        api.LocalElasticAgent = _RestartingAgent  # type: ignore[attr-defined]
        fork_workers()
        run(args)
