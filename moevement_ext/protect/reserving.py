# SPDX-License-Identifier: Apache-2.0
"""Reserves the host memory of all ranks at the start, or of one that joins."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from moevement_ext.config import node_name
from moevement_ext.errors import HostMemoryError
from moevement_ext.events import ProtectionReduced
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.replicate.host_memory import HostMemory, Share
from moevement_ext.replicate.secret import agree

logger = logging.getLogger(__name__)


def reserve(
    rank: Rank, share: Share, device: torch.device, on_degraded: Callable[[str], None]
) -> HostMemory:
    """Host memory of this rank; if any rank fails at the start, all do. Collective.

    A process that joins a running job, perhaps on another node, does without holding replicas for
    others if that helps; it is needed more than they are.

    Raises:
        HostMemoryError: this or another rank cannot reserve its host memory.
    """
    exchange = rank.exchange
    node = NodeStore(Path(rank.config.dir), rank.run_id, node_name())
    secret = agree(exchange, node)

    def attempt(share: Share) -> HostMemory:
        return HostMemory(
            rank.config,
            rank.run_id,
            share,
            device,
            on_degraded,
            partial(exchange, 'members'),
            secret,
        )

    memory: HostMemory | None = None
    problem: HostMemoryError | None = None
    try:
        memory = attempt(share)
    except HostMemoryError as error:
        problem = error
    if problem is not None and exchange.joining:
        memory = attempt(share._replace(hosts_replicas=False))
        reason = f'this rank holds no replicas for others: {problem}'
        logger.warning('sparse checkpointing: protection is reduced: %s', reason)
        rank.events.emit(ProtectionReduced(reason=reason))
    if exchange.all_agree('reserved', memory is not None):
        assert memory is not None
        return memory
    if memory is not None:
        memory.give_up()
    raise problem or HostMemoryError('another rank cannot reserve its host memory')
