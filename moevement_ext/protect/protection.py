# SPDX-License-Identifier: Apache-2.0
"""Combines the engine's parts on one rank: host memory, replication, persistence, capture.

Sizes and reserves the host memory, of all ranks or of a joining rank.
"""

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from moevement_ext.capture.layout import Operators
from moevement_ext.config import AUTO, OFF, SOFT, STOP, node_name
from moevement_ext.errors import HostMemoryError
from moevement_ext.events import Protected
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.budget import Logged, window_lengths
from moevement_ext.memory.device import bind_thread, with_index
from moevement_ext.memory.disk import KEPT, DiskWindows
from moevement_ext.memory.node_store import NodeStore
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import WindowName
from moevement_ext.memory.window.slot import SlotHeader
from moevement_ext.plan.popularity import sampled
from moevement_ext.plan.replanning import Cycle, PlanParameters, TokenCounter, WindowLoad
from moevement_ext.plan.strategy.choice import strategy_of
from moevement_ext.plan.strategy.moevement import Measured
from moevement_ext.plan.windows import budgets, checkpoint_s
from moevement_ext.protect.checkpointer import SparseCheckpointer
from moevement_ext.protect.disk_tier import DiskTier
from moevement_ext.protect.lifecycle import WindowLifecycle
from moevement_ext.protect.persistence import Persistence, WindowTracker
from moevement_ext.protect.planner import Planner
from moevement_ext.protect.replanner import Decide, Replanner, event
from moevement_ext.protect.slow_ranks import SlowRanks
from moevement_ext.protect.statistics import CaptureStatistics, Figures
from moevement_ext.rates import OtherWork, timed
from moevement_ext.regroup.waits import waited
from moevement_ext.replicate.host_memory import HostMemory, WindowRoom
from moevement_ext.replicate.node_plan import JobMemory, Member, Share, copies_of, described
from moevement_ext.replicate.secret import agree

if TYPE_CHECKING:  # jobs of other strategies do not import it
    from moevement_ext.protect.expert_ledger import ExpertLedger

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


# Part of the CPU share that captures always have.
_LEAST_OF_SHARE = 0.25


class Reserved:
    """Host memory of one rank, and the first plan, before training. Construction is collective.

    Args:
        tokens: counts the experts' load.
        context_bytes: upper bound of the auxiliary state in a slot.
        logged: logged bytes of this rank per iteration; 0 without a log.
        disk: this rank's windows on disk.

    Raises:
        HostMemoryError: this or another rank cannot reserve its host memory.
    """

    def __init__(
        self,
        rank: Rank,
        planner: Planner,
        operators: Operators,
        tokens: TokenCounter,
        context_bytes: int,
        logged: Logged,
        disk: DiskWindows | None = None,
    ) -> None:
        self.rank = rank
        self.planner = planner
        self.operators = operators
        self.tokens = tokens
        tokens.soft = rank.config.order == SOFT
        self.statistics = CaptureStatistics(rank.events)
        self.experts: ExpertLedger | None = None
        if rank.config.lossy:
            from moevement_ext.protect.expert_ledger import expert_ledger

            self.experts = expert_ledger(rank, tokens, operators)
            context_bytes += self.experts.context_bytes
        capacity = partial(planner.capacity, context_bytes=context_bytes)
        stub = partial(planner.stub_capacity, context_bytes=context_bytes)

        def sized(longest: int) -> Share:
            lengths = window_lengths(longest) if rank.config.window == AUTO else []
            return Share(
                rank.identity,
                capacity(longest),
                logged,
                disk=disk,
                longest_window=longest,
                shorter=[(capacity(length), stub(length)) for length in lengths],
                family=planner.family,
                stub_bytes=stub(longest),
                own_parts=planner.own_parts,
            )

        longest = longest_window(rank, sized(rank.config.longest_window))
        cores_train = operators.device.type == 'cpu' and rank.config.cpu_share > 0
        self.strategy = strategy_of(rank.config, longest, self._shortest_window, cores_train)
        if rank.config.window == AUTO:
            planner.compare_windows(longest)
        self._first_plan = planner.first_plan(self.strategy.first())
        window = self._first_plan.plan.window
        self._longest = longest
        share = sized(longest)._replace(window=window, slot_bytes=planner.slot_bytes(window))
        self.memory = reserve(rank, share, operators.device, self.statistics.degraded)
        self.memory.connect(partial(rank.exchange, 'addresses'))
        host = self.memory.server.address[0]
        self.persistence = Persistence(rank, host, self.memory.coordinator_secrets)

    @property
    def stops(self) -> bool:
        """True if the job ends when a recovery computes other bits; until then, no capture."""
        return self.rank.config.verify == STOP

    def first_plan(self, iteration: int) -> Cycle:
        """Return the first plan of a job, starting at `iteration`."""
        return msgspec.structs.replace(self._first_plan, origin=iteration)

    def agreed_plan(self, version: int, origin: int, store: torch.distributed.Store) -> Cycle:
        """The plan in force in a running job, from `origin` on, for a joining process.

        `store` is the one that the other ranks passed to `Protection`.
        """
        if version == self._first_plan.version:
            return self.first_plan(origin)
        plan = self.planner.announced_plan(version, store)
        return msgspec.structs.replace(plan, origin=origin)

    def captured_after(self, start: int) -> list[SlotHeader]:
        """Headers to verify a recovery from the window at `start`; empty without checks.

        A recovery that is cut off has overwritten some of them for the next one.
        """
        if self.rank.config.verify == OFF:
            return []
        own = self.rank.identity
        here = own.run, own.topology, own.rank
        found = self.memory.captured_after(start)
        return [it for it in found if (it.run, it.topology, it.owner) == here]

    def close(self, remove: bool, keep_disk: bool = False) -> None:
        """Give up the memory; with `remove` delete windows and replicas, and those on disk."""
        self.persistence.close()
        if remove and self.memory.disk is not None and not keep_disk:
            self.memory.disk.remove(self.rank.events.iteration)
        self.memory.close(remove)

    def _shortest_window(self, seen: Measured) -> int | None:
        """Return the fewest slots that all ranks' links and cores sustain at these rates."""
        copies = max(map(len, self.memory.copies.holders))
        carried = budgets(
            seen.iteration_s,
            seen.copy_bytes_per_s,
            seen.send_bytes_per_s,
            copies,
            network_bytes_per_s=self.rank.config.network_bytes_per_s,
            cpu_bytes_per_s=seen.cpu_bytes_per_s,
            cpu_share=self.rank.config.cpu_share,
            failures_per_s=self.statistics.failures_per_s(),
        )
        return self.planner.shortest_window(carried, self._longest)


class Protection:
    """The engine of one rank in training: captures by the plan in force.

    Args:
        present: the plan in force.
        store: the store of this start of the job, the same on all ranks, on a separate connection.
        last_iteration: of the training; for a lossy strategy.
        on_disk: the newest window that all ranks have on disk.
        forget_former_places: once all ranks have a window, free memory on this node that earlier
            starts of the job kept for ranks now on other nodes. Not in a joining process, which
            does not have the list of all ranks of the node.
    """

    def __init__(
        self,
        reserved: Reserved,
        present: Cycle,
        store: torch.distributed.Store,
        last_iteration: int,
        on_disk: WindowName | None = None,
        forget_former_places: bool = False,
    ) -> None:
        rank, memory, operators = reserved.rank, reserved.memory, reserved.operators
        self._rank = rank
        self.planner = reserved.planner
        self.memory = memory
        self.persistence = reserved.persistence
        self.stops = reserved.stops
        self.captured_after = reserved.captured_after
        self._operators = operators
        self._counter = reserved.tokens
        self._counted: tuple[dict[str, float], float | None] = ({}, None)
        self._seconds: list[float] = []
        self._own_s: list[float] = []
        self._windows_seen = 0
        self._position = 0
        self._step_began = 0.0
        self._waited_before = 0.0
        self._former_places = forget_former_places
        self._statistics = reserved.statistics
        self._other_work = OtherWork()
        self._last_iteration = last_iteration
        self._experts = reserved.experts
        self._slow = SlowRanks(rank.events.emit)
        waited.begin(on_gpu=operators.device.type != 'cpu')
        counting = sampled(self.planner.place.members)
        self._counts = reserved.strategy.counts_tokens and rank.number in counting
        self._device = with_index(operators.device)
        self._room = WindowRoom(memory, self._statistics.degraded)
        self._room.before(present.plan.window)
        self._disk: DiskTier | None = None
        if memory.disk is not None:
            self._disk = DiskTier(
                memory.disk,
                memory.windows,
                rank.identity,
                rank.config.disk_every,
                1e9 * rank.config.disk_gb_per_s,
                partial(WindowTracker, self.persistence, 'disk', kept=KEPT),
                self._statistics,
                on_disk,
            )
        self._reached = memory.peer_addresses()
        self.windows = WindowLifecycle(
            rank.number,
            memory.windows,
            memory.peers(),
            partial(WindowTracker, self.persistence, 'memory'),
            self._persisted,
            self._statistics,
            rank.config.max_wait,
        )
        self.windows.replicator.limit = rank.config.network_bytes_per_s
        self.windows.replicator.spreads = rank.config.network_gb_per_s == AUTO
        self.checkpointer = SparseCheckpointer(
            rank.identity, operators.slices, operators.device, self.windows, present, self._experts
        )
        self._replanner = Replanner(
            store,
            rank.number,
            rank.world_size,
            present,
            partial(self._decide, reserved.strategy.next),
            self.planner.next_plan,
            self._adopt,
        )
        self._running: tuple[SparseCheckpointer | Replanner | WindowLifecycle | DiskTier, ...] = (
            self.checkpointer,
            self._replanner,
            self.windows,
            *([] if self._disk is None else [self._disk]),
        )
        rank.events.emit(self._protected(present))

    def _protected(self, cycle: Cycle) -> Protected:
        """The event of a rank that begins to capture."""
        config, place, operators = self._rank.config, self.planner.place, self._operators
        return Protected(
            node=node_name(),
            stage=place.stage,
            world_size=self._rank.world_size,
            copies=1 + len(place.replicas),
            replicas=len(self._reached),
            window=cycle.plan.window,
            host_memory=self.memory.by_kind(),
            operators={
                name: (held.full_bytes, held.weight_bytes)
                for name, held in operators.slices.items()
            },
            experts=[name for name, kind in operators.kinds.items() if kind == 'expert'],
            strategy=config.strategy,
            interval=cycle.period,
        )

    def stop_waiting_if(self, in_vain: Callable[[], bool]) -> None:
        """End waits of the training thread once `in_vain` is true, as a rank is lost."""
        self.windows.in_vain = in_vain
        if self.memory.log is not None:
            self.memory.log.in_vain = in_vain

    def rewind_log(self, iteration: int) -> None:
        """Rewind the log to `iteration`: later sends are logged again."""
        if self.memory.log is not None:
            self.memory.log.rewind(iteration)

    def roll_back(self, name: WindowName, file: WindowFile) -> float | None:
        """Continue from this protected window; recapture later ones. Returns as `lose_tokens`."""
        self._withdraw_on_disk(name)
        self.windows.go_back_to(name)
        self.checkpointer.roll_back(name.start)
        self.windows.replicate_again(name, file)
        return self.lose_tokens(file)

    def lose_tokens(self, file: WindowFile) -> float | None:
        """Record a rollback to this window, which may contain older versions of experts.

        Returns the lost tokens of this rank's experts; None unless the strategy is lossy.
        """
        if self._experts is None:
            return None
        lost = self._experts.go_back(file.header(0), self._last_iteration)
        self._rank.events.emit(lost)
        return lost.tokens

    def room_for_recovery(self, start: int, until: int) -> None:
        """Make room in the log for a recovery from window `start` to `until`. Training thread."""
        if self.stops:  # the first window after that begins at its end
            until += self.checkpointer.schedule.plan.window
        self._room.for_recovery(start, until)

    def begin_window(self, iteration: int) -> None:
        """Begin a window with the state after `iteration`, by the plan in force, on all ranks.

        Later, if a start of the whole job is not judged yet. Earlier windows that are not persisted
        are given up, as some ranks lack them.
        """
        iteration = max(iteration, self.checkpointer.schedule.origin)
        self.windows.give_up(range(iteration))
        self.checkpointer.stop_capturing()
        self.checkpointer.roll_back(iteration - 1)
        self.checkpointer.begin_window(iteration)

    def withdraw_after(self, window: WindowName) -> None:
        """Withdraw windows after `window`, to which this rank will roll back."""
        self._withdraw_on_disk(window)
        self.windows.withdraw_after(window)

    def lose_holders(self, lost: frozenset[int]) -> None:
        """Let windows count again only once new processes of these ranks have their replicas."""
        if not lost.isdisjoint(self.memory.copies.reached(self._rank.number)):
            self.windows.withdraw_unpersisted()
            # A new process may have the same address as the lost one.
            self._reached = []

    def reach_peers(self, newest: int) -> None:
        """Offer windows up to start `newest`, the rest being recaptured, to new holders."""
        if self._reached == self.memory.peer_addresses():
            return
        self._reached = self.memory.peer_addresses()
        self.windows.change_peers(self.memory.peers(), newest)

    def exposed(self) -> AbstractContextManager[None]:
        """Count the duration of the context as time taken from training."""
        return timed(self._statistics, 'exposed_s')

    def begin(self, iteration: int, state: bytes) -> None:
        """Start capturing the state after `iteration`. Training thread."""
        committed = self.memory.ledger.get(iteration)
        self.checkpointer.begin(iteration, state, committed.loss if committed else None)
        schedule = self.checkpointer.schedule
        self._position = schedule.position(iteration)
        if self._experts is None:
            self._counter.counting = self._counts and schedule.slot(iteration) == 0
        else:
            self._experts.begins()
        if self._position == 0:
            self._room.begins(iteration, schedule.plan.window)
        self._waited_before = self.checkpointer.waited_s
        waited.take()
        self._step_began = time.perf_counter()

    def end(self, iteration: int, replayed: bool) -> None:
        """Note the end of the iteration that led to state `iteration`. Training thread.

        `replayed`: the job had committed it before.
        """
        schedule = self.checkpointer.schedule
        seconds = time.perf_counter() - self._step_began
        self._seconds.append(seconds - (self.checkpointer.waited_s - self._waited_before))
        waits = waited.take()
        if not replayed:
            self._statistics.training_s += seconds
            self._statistics.ended_at = time.time()
            self._statistics.durations.append(seconds)
            self._own_s.append(self._seconds[-1] - sum(waits.values()))
            self._statistics.own_s += self._own_s[-1]
            self._statistics.waits_s = dict(Counter(self._statistics.waits_s) + Counter(waits))
        if self._experts is not None:
            self._experts.ends()
        elif self._counter.counting:
            self._counted = (self._counter.take(), self._counter.take_capacity())
            self._counter.counting = False
        if self._position == schedule.period - 1:
            load = self._load(iteration - schedule.period)
            self._seconds.clear()
            self._own_s.clear()
            self._windows_seen += 1
            if self._windows_seen > 1:  # the first window contains warm-up
                self._replanner.observe(load)

    def _load(self, start: int) -> WindowLoad:
        """Measurements of the cycle that began at `start` and ends now."""
        tokens, capacity = self._counted
        copied, sent = self.checkpointer.copier.bytes_per_s(), self.windows.replicator.bytes_per_s()
        holders, slot_bytes = self.windows.replicator.holders, self._statistics.slot_bytes
        limit = self._rank.config.network_bytes_per_s
        load = WindowLoad(
            start=start,
            tokens=tokens,
            iteration_s=statistics.median(self._seconds),
            copy_bytes_per_s=copied,
            send_bytes_per_s=sent,
            capacity=capacity,
            cpu_bytes_per_s=self._cpu_bytes_per_s(),
            waited_s=self._statistics.waited_s(),
            checkpoint_s=checkpoint_s(slot_bytes, copied, sent, holders, limit),
            persist_s=self._statistics.persist_s,
            room=self._room.limit,
            stage=self.planner.place.stage,
            node=node_name(),
            own_s=sum(self._own_s),
            iterations=len(self._own_s),
        )
        if self._experts is None:
            return load
        return self._experts.load(load, self._last_iteration, self._counts, holders)

    def figures(self) -> Figures:
        """Current figures of protection. Any thread."""
        counted = {field.name: getattr(self._statistics, field.name) for field in fields(Figures)}
        return replace(
            Figures(**counted),
            iteration=self._rank.events.iteration,
            window=self.checkpointer.schedule.plan.window,
            copy_bytes_per_s=self.checkpointer.copier.bytes_per_s(),
            host_memory=self.memory.by_kind(),
        )

    def keep_last(self, window: WindowName, timeout_s: float) -> bool:
        """Copy the last window, which is persisted, to disk, too; see `DiskTier.keep_last`."""
        return self._disk is None or self._disk.keep_last(window, timeout_s)

    def stop(self) -> None:
        """Stop all threads, once; the memory stays."""
        parts, self._running = self._running, ()
        for part in parts:
            part.stop()

    def _persisted(self, window: WindowName) -> None:
        if not self.memory.disk_only:
            self.memory.ledger.note_complete(window.start)
        if self.memory.log is not None:
            self.memory.log.drop_until(window.start)
        self._room.settle(window.start)
        if self._disk is not None:
            self._disk.persisted(window)
        if self._former_places:
            self._former_places = False
            threading.Thread(
                target=self.memory.forget_former_places, name='sparse-ckpt-former', daemon=True
            ).start()

    def _withdraw_on_disk(self, window: WindowName) -> None:
        if self._disk is not None:
            self._disk.withdraw_after(window)

    def _cpu_bytes_per_s(self) -> float | None:
        """See `WindowLoad`. Each byte is copied, sent to each holder, and received there."""
        granted = self._rank.config.cpu_share * self.memory.cores
        if self._device.type != 'cpu' or not granted:
            return None
        replica_s = (
            self.windows.replicator.cost.s_per_byte() + self.memory.receive_cost.s_per_byte()
        )
        byte_s = self.checkpointer.copier.cost.s_per_byte() + len(self._reached) * replica_s
        other = self._other_work.share(self._statistics.captured_bytes, byte_s)
        # A recovery counts as other work, but captures always keep a part of the share.
        left = max(granted - other, _LEAST_OF_SHARE * granted)
        return left / byte_s if byte_s else None

    def _decide(
        self, decide: Decide, present: PlanParameters, loads: Sequence[WindowLoad]
    ) -> PlanParameters | None:
        """Judge the ranks, and decide the next plan by the same loads. Replanner's thread."""
        self._slow.observe(loads)
        return decide(present, loads)

    def _adopt(self, plan: Cycle) -> None:
        """Adopt a plan, windows before it is in force. Replanner's thread."""
        bind_thread(self._device)
        self._room.before(plan.plan.window)
        self.checkpointer.schedule_next(plan)
        self._rank.events.emit(event(plan, self._operators.slices))
