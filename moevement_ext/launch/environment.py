# SPDX-License-Identifier: Apache-2.0
"""Environment of workers on emulated nodes, with the variables that torchrun sets."""

import argparse
from collections.abc import Sequence

from moevement_ext.config import COORDINATOR, GUEST, ConfigurationError
from moevement_ext.launch import shared_gpu
from moevement_ext.launch.launch_config import LaunchConfig
from moevement_ext.membership import mailbox
from moevement_ext.memory.limits import SPARES

_DEFAULTS = {
    'OMP_NUM_THREADS': '1',
    'PYTHONUNBUFFERED': '1',  # keeps the output of a killed worker
}


# Megatron requires one hardware queue of the GPU with these flags: kernels then begin in launch
# order, which hides the communication of tensor and context parallelism before Blackwell. Elsewhere
# one queue only delays work: small copies to the host wait behind captures, and overlapped
# exchanges between experts wait behind compute.
_ONE_QUEUE = {'CUDA_DEVICE_MAX_CONNECTIONS': '1'}
_PARALLEL = ('--tensor-model-parallel-size', '--context-parallel-size')
# With these flags Megatron does not require one queue, or refuses it.
_WANT_MORE = ('--overlap-moe-expert-parallel-comm', '--use-torch-fsdp2', '--use-megatron-fsdp')


def connections(flags: Sequence[str]) -> dict[str, str]:
    """Environment variables that Megatron requires with these flags of the program."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in _PARALLEL:
        parser.add_argument(flag, nargs='?', default='1')
    for flag in _WANT_MORE:
        parser.add_argument(flag, action='store_true', dest='more')
    found, _ = parser.parse_known_args(list(flags))
    sizes = {found.tensor_model_parallel_size, found.context_parallel_size}
    return {} if found.more or sizes <= {'1', None} else dict(_ONE_QUEUE)


def default_variables_here(config: LaunchConfig) -> dict[str, str]:
    """`default_variables` for workers on this machine."""
    return default_variables(config) | (shared_gpu.DEFAULTS if config.share_gpu else {})


def default_variables(config: LaunchConfig) -> dict[str, str]:
    """Environment variables of a worker that the user may override, on any machine."""
    return {**_DEFAULTS, **connections(config.flags)}


def job_variables(
    config: LaunchConfig, ranks: int, host: str, port: int, coordinator: int
) -> dict[str, str]:
    """Variables of all workers that the user cannot override.

    `port` on `host` is that of the store, `coordinator` that of the coordinator.
    """
    return {
        'WORLD_SIZE': str(ranks),
        'LOCAL_WORLD_SIZE': str(config.workers_per_node),
        'MASTER_ADDR': host,
        'MASTER_PORT': str(port),
        'TORCHELASTIC_USE_AGENT_STORE': 'True',
        COORDINATOR: f'{host}:{coordinator}',
        mailbox.VARIABLE: config.launch,
        SPARES: str(config.spares),
    }


def rank_variables(config: LaunchConfig, rank: int, restarts: int) -> dict[str, str]:
    """Environment variables that differ between ranks, and between restarts of a rank."""
    node = config.node_of(rank)
    return {
        'RANK': str(rank),
        'LOCAL_RANK': str(rank - config.ranks_of(node).start),
        'GROUP_RANK': str(node),
        'TORCHELASTIC_RESTART_COUNT': str(restarts),
    }


def guest_variables(node: int) -> dict[str, str]:
    """Further variables of a rank whose node is a guest of another, which has ranks on its GPUs.

    NCCL refuses two ranks on one GPU if they are on the same host.
    """
    return {GUEST: '1', 'NCCL_HOSTID': f'guest-node{node}'}


def name_here(node: int) -> str:
    return f'node{node}'


def variables_here(
    config: LaunchConfig, rank: int, restarts: int, host: int | None = None, guest: bool = False
) -> dict[str, str]:
    """`rank_variables` for a worker on the emulated node `host`; None: its own.

    `LOCAL_RANK` chooses the GPU. The emulated nodes share the GPUs of this machine, so with
    GPUs it is the rank itself, not the place in the node, or 0 if all share the first GPU.
    """
    import torch

    found = rank_variables(config, rank, restarts)
    node = config.node_of(rank)
    host = node if host is None else host
    found |= guest_variables(node) if guest else {}
    if config.share_gpu:
        found |= shared_gpu.of_rank(rank)
    elif torch.cuda.is_available():
        found['LOCAL_RANK'] = str(rank + config.ranks_of(host).start - config.ranks_of(node).start)
    return found | {'MOEVEMENT_NODE': name_here(host)}


def check_devices(config: LaunchConfig) -> None:
    """Check that each worker has its own GPU, unless all share one or no GPU is in use.

    Raises `ConfigurationError` also if there is no GPU to share.
    """
    import torch

    if config.share_gpu:
        if not torch.cuda.is_available():
            raise ConfigurationError('--share-gpu: there is no GPU here; leave it out.')
    elif torch.cuda.is_available() and torch.cuda.device_count() < config.world_size:
        raise ConfigurationError(
            f'--nodes {config.nodes} --workers-per-node {config.workers_per_node} needs '
            f'{config.world_size} GPUs, one for each worker; there are '
            f'{torch.cuda.device_count()}. --share-gpu puts all on the first; '
            'CUDA_VISIBLE_DEVICES= (empty) runs on the CPU.'
        )
