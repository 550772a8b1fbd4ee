# SPDX-License-Identifier: Apache-2.0
"""Rows of `compare peers`: how each project protects the trainer, and how its workers start."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..lab.launch import ROOT, Launch, Launcher
from ..lab.models import dense_flags, sparse_flags
from ..lab.torchrun import Agents
from . import peer_program

RANKS = 2
SITE = ROOT / '.peers'
"""Where `scripts/peers.sh` installs."""
# Otherwise the store of torchrun's c10d rendezvous keeps addresses of dead workers, too.
_NEW_STORE = {'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'}
_PROGRAM = peer_program.__file__


class Elastic(Agents):
    """torchrun with the c10d rendezvous: the static rendezvous keeps dead addresses in its store.

    Attributes:
        module: the module that starts the workers.
        more: further flags of the module.
    """

    module = 'torch.distributed.run'
    more: tuple[str, ...] = ()

    def command(self, node: int, port: int) -> list[str]:
        launch = self._launch
        return [
            sys.executable, '-m', self.module,
            '--nnodes', '1', '--nproc-per-node', str(launch.workers_per_node),
            '--rdzv-backend', 'c10d', '--rdzv-endpoint', f'127.0.0.1:{port}',
            '--rdzv-id', 'compare', '--max-restarts', str(launch.max_restarts),
            '--monitor-interval', '0.1', *self.more,
            '--log-dir', str(launch.folder / 'workers'), '--tee', '3',
            *launch.program(),
        ]  # fmt: skip


class InJob(Elastic):
    """nvidia-resiliency-ext's launcher, which restarts workers within the job."""

    module = 'nvidia_resiliency_ext.fault_tolerance.launcher'
    more = ('--ft-ignore-missing-cfg',)


class PeerRow(NamedTuple):
    """A way to protect the trainer."""

    title: str
    flags: Callable[[Path, Path], list[str]] = lambda folder, memory: []
    """The row's flags, from the folder of the job and a directory in a tmpfs."""
    starts: Launcher | Callable[[Launch], Agents] = Elastic
    nodes: int = 1
    spares: int = 0
    lm_resiliency: bool = False
    replicas_of_data: bool = False
    """Runs with data parallelism, as it cannot run with pipeline stages."""
    ours: bool = False

    def launch(self, folder: Path, memory: Path, flags: list[str]) -> Launch:
        variables = dict(_NEW_STORE) if self.starts is Elastic else {}
        if self.lm_resiliency:
            variables[peer_program.FOLDER] = str(memory / 'lm-resiliency')
        if not self.ours:
            inherited = os.environ.get('PYTHONPATH')
            modules = [str(ROOT), str(SITE), *([inherited] if inherited else [])]
            variables['PYTHONPATH'] = os.pathsep.join(modules)
        return Launch(
            folder, [*flags, *self.flags(folder, memory)], self.nodes, RANKS // self.nodes, 10,
            self.spares, variables, program_file=_PROGRAM,
        )  # fmt: skip


def _ours(recovery: str) -> Callable[[Path, Path], list[str]]:
    def flags(folder: Path, memory: Path) -> list[str]:
        own = sparse_flags(memory, 'compare', 1, folder / 'events')
        return [*own, '--sparse-ckpt-recovery', recovery]

    return flags


def _local(folder: Path, memory: Path) -> list[str]:
    """Megatron's flags for checkpoints of nvidia-resiliency-ext in a tmpfs, replicated."""
    kept = str(folder / 'checkpoints')
    return [
        *('--save', kept, '--load', kept, '--save-interval', '1000000'),
        *('--ckpt-format', 'torch_dist', '--ckpt-assume-constant-structure'),
        *('--non-persistent-ckpt-type', 'local', '--non-persistent-save-interval', '1'),
        *('--non-persistent-local-ckpt-dir', str(memory / 'local')),
        *('--replication', '--replication-jump', '1', '--replication-factor', '2'),
    ]


PLAIN, PLAIN_DATA = 'plain', 'plain-data'
PEERS = {
    PLAIN: PeerRow('plain Megatron'),
    PLAIN_DATA: PeerRow('plain Megatron, data parallel', replicas_of_data=True),
    'localized-spare': PeerRow(
        'MoEvement, localized, hot spare', _ours('localized'), Launcher.LOCAL, nodes=2, spares=1,
        ours=True,
    ),
    'localized': PeerRow(
        'MoEvement, localized', _ours('localized'), Launcher.LOCAL, nodes=2, ours=True
    ),
    'whole-job': PeerRow(
        'MoEvement, whole job', _ours('whole-job'), Launcher.TORCHRUN, nodes=2, ours=True
    ),
    'nvrx-in-job': PeerRow(
        'nvidia-resiliency-ext 0.7.0: local, replicated; in-job restart', _local, InJob
    ),
    'lm-resiliency': PeerRow(
        'lm-resiliency 0.2.0, data parallel', lm_resiliency=True, replicas_of_data=True
    ),
    'torch-dist': PeerRow(
        'torch_dist, synchronous',
        lambda folder, memory: dense_flags(folder / 'checkpoints', 1, asynchronous=False),
    ),
}  # fmt: skip
"""All protect every iteration. In the order of the table."""

CANNOT = {
    'torchft 0.2.0': (
        'its manager decides in the step of a torch.optim.Optimizer whether to commit, and '
        'restores state_dicts of both; the optimizer of Megatron is none, and shards its state',
        'grep -n "class OptimizerWrapper" -A46 .peers/torchft/optim.py',
    ),
    'lm-resiliency 0.2.0, experts sharded': (
        'it reads ChainedOptimizer.optimizer, which asserts that there is a single optimizer; with '
        'expert parallelism there are two',
        'grep -n "base_opt = " -B7 .peers/lm_resiliency/integrations/megatron/adapter.py',
    ),
}
"""For each project that cannot run here, the reason, and the command that shows it."""
