# SPDX-License-Identifier: Apache-2.0
"""Sizes and reserves host memory, of all ranks or of a joining rank."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import torch

from moevement_ext.config import AUTO, node_name
from moevement_ext.errors import HostMemoryError
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.budget import window_lengths
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.replicate.host_memory import HostMemory
from moevement_ext.replicate.node_plan import JobMemory, Member, Share, copies_of, described
from moevement_ext.replicate.secret import agree

_MEMBER = msgspec.msgpack.Decoder(Member)


def longest_window(rank: Rank, share: Share) -> int:
    """The longest allowed W that fits in the host memory of all nodes; 1 if none fits.

    Collective. Returns a fixed window unchanged. `share` has the sizes of this rank's files for
    each of `window_lengths` of the longest allowed W.
    """
    config, exchange = rank.config, rank.exchange
    if config.window != AUTO:
        return config.longest_window
    lengths = window_lengths(config.max_window)
    directory = Path(config.dir) / rank.run_id / node_name()
    own = described(share, config.topology, directory)
    members = [_MEMBER.decode(item) for item in exchange('room', msgspec.msgpack.encode(own))]
    copies = copies_of(members, config.topology, config.replicas)
    job = JobMemory(members, copies, lengths[-1], config.log_lag, config.disk is not None)

    def fits(length: int) -> bool:
        try:
            job.of_node(own.node, length).check(config.host_memory_gb, directory)
            job.of_node(own.node, length, shared=True).check(None, directory)
        except (HostMemoryError, OSError):  # `reserve` reports the error
            return False
        return True

    here = next((index for index in reversed(range(len(lengths))) if fits(lengths[index])), 0)
    found = exchange('longest-window', msgspec.msgpack.encode(here))
    return lengths[min(msgspec.msgpack.decode(item, type=int) for item in found)]


def reserve(
    rank: Rank, share: Share, device: torch.device, on_degraded: Callable[[str], None]
) -> HostMemory:
    """Reserve host memory of this rank; at the start all ranks fail together. Collective.

    A process that joins a running job, perhaps on another node, holds no replicas for other
    ranks if there is no room: the job needs the process more than the replicas. Raises
    `HostMemoryError` if this or another rank cannot reserve its memory, and `StoreInUseError` if
    another live job has the same run id.
    """
    exchange = rank.exchange
    node = NodeStore(Path(rank.config.dir), rank.run_id, node_name())
    if not exchange.joining:  # another job of this name may keep its secret here
        with suppress(HostMemoryError, OSError):  # `attempt` raises it again
            node.wait_for_predecessor(rank.number)
    secret = agree(exchange, node, rank.number)

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
        rank.events.reduced(f'this rank holds no replicas for others: {problem}')
    if exchange.all_agree('reserved', memory is not None):
        assert memory is not None
        return memory
    if memory is not None:
        memory.give_up()
    raise problem or HostMemoryError('another rank cannot reserve its host memory')
