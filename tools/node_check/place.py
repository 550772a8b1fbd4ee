# SPDX-License-Identifier: Apache-2.0
"""Rank and rendezvous of this process, from the variables of torchrun or of a Slurm step."""

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistError, TCPStore

from moevement_ext.config import node_name
from tools.lab.errors import LabError

_TORCHRUN = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')
_SLURM = ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID')


class Place(NamedTuple):
    """Rank of a process, and the rendezvous of all processes."""

    rank: int
    ranks: int
    local_rank: int
    host: str
    """Host of the rendezvous."""
    port: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> 'Place':
        """Read the place from environment variables.

        Raises:
            LabError: the variables are missing.
        """
        for names in (_TORCHRUN, _SLURM):
            if all(name in environment for name in (*names, 'MASTER_ADDR', 'MASTER_PORT')):
                rank, ranks, local_rank = (int(environment[name]) for name in names)
                host, port = environment['MASTER_ADDR'], int(environment['MASTER_PORT'])
                return cls(rank, ranks, local_rank, host, port)
        raise LabError(
            f'{", ".join(_TORCHRUN)}, MASTER_ADDR and MASTER_PORT are not set: start this with '
            'torchrun, or by scripts/slurm_nccl_check.sbatch'
        )


def meet(place: Place, timeout_s: float) -> tuple[TCPStore, list[str]]:
    """Join the rendezvous; returns its store, and the node of each rank.

    Raises:
        LabError: ranks did not join in time; the message names them.
    """
    try:
        store = TCPStore(
            place.host, place.port, is_master=place.rank == 0 and not _agent_has_it(),
            timeout=timedelta(seconds=timeout_s), wait_for_workers=False,
        )  # fmt: skip
        store.set(_key(place.rank), _node())
    except DistError as error:
        raise LabError(f'{_node()} does not reach {place.host}:{place.port}: {error}') from error
    deadline = time.monotonic() + timeout_s
    missing = list(range(place.ranks))
    while missing := [rank for rank in missing if not store.check([_key(rank)])]:
        if time.monotonic() > deadline:
            raise LabError(
                f'ranks {missing[:8]} of {place.ranks} did not come within {timeout_s:.0f} s: '
                'see the log of their nodes'
            )
        time.sleep(0.1)
    return store, [node.decode() for node in store.multi_get(list(map(_key, range(place.ranks))))]


def _node() -> str:
    """Name of this node in the run."""
    return os.environ.get('SLURMD_NODENAME') or node_name()


def _agent_has_it() -> bool:
    """True if torchrun's agent serves the store at that port."""
    return os.environ.get('TORCHELASTIC_USE_AGENT_STORE') == 'True'


def _key(rank: int) -> str:
    return f'node-check/{rank}'
