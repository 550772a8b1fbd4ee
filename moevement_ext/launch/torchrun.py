# SPDX-License-Identifier: Apache-2.0
r"""`torchrun` whose agents fork the workers, and need no agent's store.

    moevement torchrun --nnodes 4 --node-rank 2 --nproc-per-node 8 \
        --max-restarts 100 pretrain_gpt.py <flags> --sparse-ckpt [--sparse-ckpt-store HOST:PORT]

All flags are torchrun's. Workers are forks of one process on each node that has imported the
program; see `torchrun_workers`. With `--sparse-ckpt-store` the rendezvous is static and goes
through that store. In torchrun the agent of the first node serves the store, so that this agent's
death ends the job; here no agent serves it. A restarted agent takes the place of the lost agent;
when the store is lost, the agents wait for another store at the same address.

Checked against torch 2.15.
"""

import re
import secrets
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
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
from torch.distributed.run import determine_local_world_size, get_args_parser, run

from moevement_ext.config import ConfigurationError
from moevement_ext.errors import EXIT_OTHER_BITS, EXIT_USER_ERROR, UserError
from moevement_ext.launch.launch_config import STORE_FLAG, flag_value, split_address
from moevement_ext.launch.torchrun_workers import fork_workers
from moevement_ext.memory.window.settings import digest_of
from moevement_ext.store.server import connect
from moevement_ext.system import leaving
from moevement_ext.system.process_setup import ask_again_soon

_BACKEND = 'sparse-ckpt-store'
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
        return _BACKEND

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

    On any signal to end, the agent sends its workers their exit signal.
    """

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        if isinstance(sys.exception(), SignalException):  # otherwise the workers restart
            death_sig = leaving.listened_for(self._worker_group.spec.args)
        super()._shutdown(death_sig, timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers; torch calls this every `--monitor-interval` seconds.

        Raises `UserError` if a worker ended because of a user error before any restart. A
        user error exists from the start; after a restart the same exit status may have
        another cause, such as too little memory on one node.
        """
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


def parse(argv: Sequence[str]) -> Namespace:
    """Parse torchrun's arguments and make the program's store, if given, the agents' rendezvous.

    Raises `ConfigurationError` if torchrun has another rendezvous then.
    """
    parser = get_args_parser()
    parser.prog = 'moevement torchrun'
    args: Namespace = parser.parse_args(list(argv))
    store = flag_value(args.training_script_args)
    _listen_for_exit_signals(args)
    if store is None:
        return args
    if args.standalone or args.rdzv_endpoint or args.rdzv_backend != 'static':
        raise ConfigurationError(
            f'{STORE_FLAG} is the rendezvous endpoint of the agents: leave out --standalone, '
            '--rdzv-backend and --rdzv-endpoint.'
        )
    split_address(store)
    _check_numbers(args)
    args.rdzv_backend, args.rdzv_endpoint = _BACKEND, store
    rank = f'rank={args.node_rank}'
    args.rdzv_conf = f'{args.rdzv_conf},{rank}' if args.rdzv_conf else rank
    args.node_rank = 0  # torchrun warns that it ignores it
    return args


def _listen_for_exit_signals(args: Namespace) -> None:
    """Let the agent pass on each signal that asks the program for its end."""
    asking = {*leaving.ASKING, leaving.listened_for(args.training_script_args)}
    given = args.signals_to_handle.split(',')
    args.signals_to_handle = ','.join(
        dict.fromkeys([*given, *(one.name for one in sorted(asking))])
    )


def _check_numbers(args: Namespace) -> None:
    """Check the numbers that torchrun checks later, with a traceback."""
    nodes, processes = args.nnodes, args.nproc_per_node
    if not re.fullmatch(r'([1-9]\d*)(:\1)?', nodes):
        raise ConfigurationError(f'--nnodes {nodes} must be the number of nodes, 1 or more.')
    try:
        determine_local_world_size(processes)
    except ValueError as error:
        raise ConfigurationError(
            f'--nproc-per-node {processes} must be the number of processes on this node, or gpu, '
            f'if it has some ({error}).'
        ) from error


@record
def main(argv: Sequence[str] | None = None) -> None:
    ask_again_soon()
    with leaving.in_one_line():
        args = parse(sys.argv[1:] if argv is None else argv)
        rendezvous_handler_registry.register(_BACKEND, OutsideStore.create)
        api.LocalElasticAgent = _RestartingAgent  # type: ignore[attr-defined]
        fork_workers()
        run(args)


if __name__ == '__main__':
    main()
