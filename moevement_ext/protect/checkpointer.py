# SPDX-License-Identifier: Apache-2.0
"""Captures one slot of the window per iteration, by the plan in force.

`lifecycle` handles the window after its capture.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from moevement_ext import faults
from moevement_ext.capture.copier import Copier
from moevement_ext.capture.layout import OperatorSlices, SlotLayout
from moevement_ext.faults import Phase
from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.window import settings
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.name import History, RankIdentity, WindowName
from moevement_ext.memory.window.refusal import RefusedWindow
from moevement_ext.memory.window.slot import FORMAT_VERSION, SlotContext, SlotHeader
from moevement_ext.plan.replanning import Cycle
from moevement_ext.protect.lifecycle import WindowLifecycle

if TYPE_CHECKING:  # jobs of other strategies do not import it
    from moevement_ext.protect.expert_ledger import Checkpoint, ExpertLedger


@dataclass(eq=False)
class _Writing:
    """A window being written: begun by the training thread, sealed slot by slot on another."""

    file: WindowFile
    name: WindowName
    length: int
    started: int = 0
    unsealed: int = 0
    given_up: bool = False
    partial: 'Checkpoint | None' = None
    """Experts selected by a lossy strategy; None for other strategies."""

    @property
    def complete(self) -> bool:
        """True when all slots were started; the last copies may still be running."""
        return self.started == self.length


class SparseCheckpointer:
    """Sparse checkpointing of one rank.

    The training thread calls `begin` before an iteration and `before_update` before the
    optimizer writes; everything else happens on other threads. Failures never reach the
    training thread: protection is reduced, reported and counted (invariant I6). `waited_s` is
    the time that updates have waited for copies, `schedule` the plan in force, `history` the one
    that windows are of. `experts` is the ledger of a lossy strategy.
    """

    def __init__(
        self,
        identity: RankIdentity,
        operators: Mapping[str, OperatorSlices],
        device: torch.device,
        lifecycle: WindowLifecycle,
        schedule: Cycle,
        experts: 'ExpertLedger | None' = None,
    ) -> None:
        self._identity = identity
        self._settings = settings.encode(identity.settings)
        self._operators = operators
        self._lifecycle = lifecycle
        self.statistics = lifecycle.statistics
        self._experts = experts
        self._before: WindowName | None = None
        self.history = History()
        self.waited_s = 0.0
        self.copier = Copier(device)
        self._lock = threading.Lock()
        self._window: _Writing | None = None
        self._given_up: list[_Writing] = []
        self._captured = -1
        self._upcoming: list[Cycle] = []
        self._aligned = schedule.origin  # where all ranks began a window under any plan
        self._adopt(schedule)

    def schedule_next(self, schedule: Cycle) -> None:
        """Change to another plan at its origin. Any thread."""
        with self._lock:
            self._upcoming.append(schedule)

    def begin_window(self, iteration: int) -> None:
        """Begin windows at `iteration`, by the plan in force, on all ranks. Training thread.

        A plan with an earlier origin that this rank receives late is aligned to
        `iteration`, too; otherwise the rank's windows would never match those of the other
        ranks.
        """
        with self._lock:
            self._aligned = iteration
            self._upcoming.append(msgspec.structs.replace(self.schedule, origin=iteration))

    def begin(self, iteration: int, state: bytes, loss: float | None = None) -> None:
        """Start capturing the state after `iteration`, which the next iteration will read.

        Called by the training thread before any part of iteration `iteration + 1` runs.
        `state` is the encoded auxiliary state that travels with the slot (RNG, scheduler, ...);
        `loss` is this rank's in the newest committed iteration, if it has one.
        """
        faults.at_iteration(iteration + 1)
        self.statistics.events.iteration = iteration
        if iteration <= self._captured:
            return  # an iteration repeated after a failure; its state is captured already
        self._captured = iteration
        self._change_plan(iteration)
        self._release_given_up()
        slot = self.schedule.slot(iteration)
        if slot is None:
            return
        if slot == 0:
            self._window = self._open(iteration)
        window = self._window
        if window is None or window.given_up:
            return
        try:
            self._capture(window, slot, iteration, state, loss)
        except Exception as error:
            self._failed(window, error)

    def stop_capturing(self) -> None:
        """Wait for running captures and give up their window.

        Called by the training thread before it overwrites the captured state with older
        state.
        """
        self.copier.drain()
        if self._window is not None and not self._window.complete:
            self._give_up(self._window)
        self._window = None
        self._release_given_up()

    def roll_back(self, start: int) -> None:
        """Capture again from the window after the one that began at `start`. Training thread.

        Windows of an earlier plan are not captured again.
        """
        self._captured = start
        self._before = None
        self._lifecycle.give_up(range(start + 1, self.schedule.origin))

    def before_update(self) -> None:
        """Wait until the optimizer may write. Training thread."""
        waited_s = self.copier.wait()
        self.waited_s += waited_s
        self.statistics.exposed_s += waited_s
        self.statistics.iterations += 1

    @property
    def window_under_way(self) -> bool:
        """True if the current window lacks slots. Training thread."""
        window = self._window
        return window is not None and not (window.complete or window.given_up)

    def drain(self) -> None:
        self.copier.drain()

    def stop(self) -> None:
        self.copier.stop()

    def _adopt(self, schedule: Cycle) -> None:
        self.schedule = schedule
        self._layouts = [
            SlotLayout(schedule.plan, slot, self._operators) for slot in range(schedule.plan.window)
        ]

    def _change_plan(self, iteration: int) -> None:
        with self._lock:
            due = [schedule for schedule in self._upcoming if schedule.origin <= iteration]
            self._upcoming = [s for s in self._upcoming if s.origin > iteration]
        if due:
            if self._window is not None and not self._window.complete:
                self._give_up(self._window)
                self._lifecycle.give_up([self._window.name.start])
            self._window = None
            newest = max(due, key=lambda schedule: (schedule.version, schedule.origin))
            origin = max(newest.origin, self._aligned)
            self._adopt(msgspec.structs.replace(newest, origin=origin))
            # Ranks that received the plan in time have windows that this rank lacks.
            self._lifecycle.give_up(range(self.schedule.origin, iteration))

    def _open(self, iteration: int) -> _Writing | None:
        partial, digest = None, self.schedule.digest
        length = self.schedule.plan.window
        if self._experts is not None:
            partial = self._choose(iteration, self._experts)
            if partial is None:
                return None
            digest = partial.digest
        name = self.history.window(iteration, digest)
        if partial is not None:
            self._before = name
        file = self._lifecycle.open(name)
        return None if file is None else _Writing(file, name, length, partial=partial)

    def _choose(self, iteration: int, experts: 'ExpertLedger') -> 'Checkpoint | None':
        """Select the experts of a lossy checkpoint; None if its base is unsettled or gone."""
        settled, persisted = self._lifecycle.newest_persisted(self._before)
        if not settled:
            self._lifecycle.skip(iteration)
            return None
        base = experts.base(persisted)
        try:
            return experts.checkpoint(self.schedule, iteration, base, self._lifecycle.kept(base))
        except (ValueError, RefusedWindow) as error:
            self._lifecycle.give_up([iteration])
            self.statistics.degraded(f'window {iteration}: {error}')
            return None

    def _give_up(self, window: _Writing) -> None:
        """Drop a window that no rank relies on; its file is reused once its seals have run."""
        with self._lock:
            if not window.given_up:
                window.given_up = True
                self._given_up.append(window)

    def _release_given_up(self) -> None:
        with self._lock:
            idle = [window for window in self._given_up if window.unsealed == 0]
            self._given_up = [window for window in self._given_up if window.unsealed]
        for window in idle:
            self._lifecycle.abandon(window.name, window.file)

    def _capture(
        self, window: _Writing, slot: int, iteration: int, state: bytes, loss: float | None
    ) -> None:
        if iteration != window.name.start + slot:
            raise ValueError(f'iteration {iteration} is not that of slot {slot}')
        layout = self._layouts[slot]
        payload = window.file.reserve_slot(slot, layout.payload_bytes)
        partial = window.partial
        older = partial.older if partial else frozenset()
        copies = partial.copies if partial else None
        context = SlotContext(list(layout.full), list(layout.weights), state, copies, loss)
        header = slot_header(
            self._identity,
            window.name,
            slot,
            layout,
            context,
            window=self.schedule.plan.window,
            settings=b'' if slot else self._settings,
        )
        copied = layout.payload_bytes - (partial.older_bytes(layout) if partial else 0)
        self.statistics.slot_bytes = copied
        self.statistics.captured_bytes += copied
        with self._lock:
            window.unsealed += 1
            window.started += 1
        try:
            self.copier.start(
                layout.copies(payload, True, older, window.file),
                lambda: layout.copies(payload, False, older, window.file),
                seal=lambda: self._seal(window, header, layout, payload),
                on_error=lambda error: self._ended(window, error),
            )
        except Exception as error:
            self._ended(window, error)

    def _seal(
        self, window: _Writing, header: SlotHeader, layout: SlotLayout, payload: Bytes
    ) -> None:
        """Seal a slot after all its copies. Sealing thread."""
        faults.point(Phase.SEAL)
        if window.partial is not None and not window.given_up:
            window.file.kept = window.partial.take_older(layout, payload)
        self.statistics.copy_bytes_per_s = self.copier.bytes_per_s()
        if not window.given_up:
            self._lifecycle.sealed(window.file, header)
        self._ended(window)

    def _ended(self, window: _Writing, error: Exception | None = None) -> None:
        """Record that a slot is sealed or failed, with no further writes to it. Any thread."""
        try:
            if error is not None:
                self._failed(window, error)
        finally:
            with self._lock:
                window.unsealed -= 1

    def _failed(self, window: _Writing, error: Exception) -> None:
        """Drop the window of a failed capture, keep the persisted one, train on."""
        self._give_up(window)
        self._lifecycle.give_up([window.name.start])
        self.statistics.degraded(f'window {window.name.start}: {type(error).__name__}: {error}')


def slot_header(
    identity: RankIdentity,
    name: WindowName,
    slot: int,
    layout: SlotLayout,
    context: SlotContext,
    window: int = 1,
    settings: bytes = b'',
) -> SlotHeader:
    """Header of a slot of this rank's window `name`, which has `window` slots."""
    return SlotHeader(
        version=FORMAT_VERSION,
        run=identity.run,
        topology=identity.topology,
        owner=identity.rank,
        start=name.start,
        window=window,
        slot=slot,
        iteration=name.start + slot,
        plan=name.plan,
        payload_bytes=layout.payload_bytes,
        records=layout.records,
        context=msgspec.msgpack.encode(context),
        settings=settings,
        placed=identity.placed,
    )
