# SPDX-License-Identifier: Apache-2.0
r"""`torchrun` whose agents fork the workers, and need no agent's store.

    moevement torchrun --nnodes 4 --node-rank 2 --nproc-per-node 8 \
        --max-restarts 100 pretrain_gpt.py <flags> --sparse-ckpt [--sparse-ckpt-store HOST:PORT]

All flags are those of `torchrun --help`. Workers are forks of one process on each node that has
imported the program. With `--sparse-ckpt-store` the rendezvous is static and goes through that
store. In torchrun the agent of the first node serves the store, so that this agent's death ends the
job; here no agent serves it. A restarted agent takes the place of the lost agent; when the store is
lost, the agents wait for another store at the same address.
"""

import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from moevement_ext.config import ConfigurationError
from moevement_ext.config_file import value_of
from moevement_ext.launch.launch_config import (
    STORE_BACKEND,
    STORE_FLAG,
    split_address,
)
from moevement_ext.launch.template import fork_ahead, not_importable
from moevement_ext.system import leaving
from moevement_ext.system.process_setup import ask_again_soon

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

_THREADS = 'OMP_NUM_THREADS'


def plug_in() -> 'Callable[[RendezvousParameters], RendezvousHandler]':
    """Entry point of `torchrun.handlers`, which torch calls while it is only half imported."""

    def create(params: 'RendezvousParameters') -> 'RendezvousHandler':
        from moevement_ext.launch.torchrun_agent import take_seat

        return take_seat(params)

    return create


def parse(argv: Sequence[str]) -> Namespace:
    """Parse torchrun's arguments and make the program's store, if given, the agents' rendezvous.

    Raises `ConfigurationError` if torchrun has another rendezvous then.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = 'moevement torchrun'
    parser.error = partial(leaving.Parser.error, parser)  # type: ignore
    args: Namespace = parser.parse_args(list(argv))
    store = value_of(args.training_script_args, STORE_FLAG)
    _listen_for_exit_signals(args)
    if store is None:
        return args
    if args.standalone or args.rdzv_endpoint or args.rdzv_backend != 'static':
        raise ConfigurationError(
            f'{STORE_FLAG} is the rendezvous endpoint of the agents: leave out --standalone, '
            '--rdzv-backend and --rdzv-endpoint.'
        )
    split_address(store)
    if not re.fullmatch(r'([1-9]\d*)(:\1)?', args.nnodes):  # torchrun does so with a traceback
        raise ConfigurationError(f'--nnodes {args.nnodes} must be the number of nodes, 1 or more.')
    args.rdzv_backend, args.rdzv_endpoint = STORE_BACKEND, store
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


def _processes(wanted: str) -> int:
    """Number of processes on this node; raises `ConfigurationError`, like torchrun later."""
    from torch.distributed.run import determine_local_world_size

    try:
        return int(determine_local_world_size(wanted))
    except ValueError as error:
        raise ConfigurationError(
            f'--nproc-per-node {wanted} must be the number of processes on this node, or gpu, '
            f'if it has some ({error}).'
        ) from error


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] in (['-h'], ['--help']):
        parser = leaving.Parser('moevement torchrun', description=__doc__)
        parser.usage = '%(prog)s [flags of torchrun] program [its flags]'
        parser.parse_args(given[:1])
    ask_again_soon()
    counted = _THREADS in os.environ
    os.environ.setdefault(_THREADS, '1')  # before torch, which counts its threads
    with leaving.in_one_line():
        args = parse(given)
        several = _processes(args.nproc_per_node) > 1
    if not (counted or several):
        del os.environ[_THREADS]  # torchrun lets a single worker use all cores
    elif argv is None:
        _fork_template(args)
    from moevement_ext.launch.torchrun_agent import run_agent

    run_agent(args)


def _fork_template(args: Namespace) -> None:
    """Start the process that forks the workers by a fork of this one, which has imported torch."""
    program = args.training_script
    wrapped = args.module or args.no_python or args.run_path or args.numa_binding
    if not wrapped and not_importable(program) is None:
        unbuffered = {**os.environ, 'PYTHONUNBUFFERED': '1'}
        fork_ahead(program, args.training_script_args, unbuffered)


if __name__ == '__main__':
    main()
