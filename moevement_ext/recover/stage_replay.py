# SPDX-License-Identifier: Apache-2.0
"""Replays a lost pipeline stage from its window and its neighbours' logs (paper section 3.4).

All ranks of the stage convert the window to a dense state and continue to the newest committed
iteration. The stage's inputs are prefetched from the logs of the neighbouring stages; if such a
stage replays as well, its log is filled while it is read. If all stages roll back together
(`--sparse-ckpt-recovery global`), they send and receive as in training, and nothing is logged.

A stage that replays alone keeps five rules. In Megatron's adapter, it sends into its own log only
(`seams/p2p.py`), takes reduced scalars from slots and the ledger (`state/global_scalars.py`), and
computes no weight gradients or updates of frozen operators (`state/frozen.py`). Here, it captures
nothing until the state is dense; with `--sparse-ckpt-verify stop`, nothing until it is judged.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import msgspec

from moevement_ext import faults
from moevement_ext.config import OFF
from moevement_ext.errors import SparseCheckpointError
from moevement_ext.faults import Phase
from moevement_ext.logger import logger_of
from moevement_ext.membership.rank import Rank
from moevement_ext.membership.report import Report
from moevement_ext.memory.ledger import LedgerEntry
from moevement_ext.memory.upstream_log.record import CorruptLog, Direction
from moevement_ext.memory.window.name import TRIES
from moevement_ext.memory.window.refusal import RefusedWindow, UnreadableWindow
from moevement_ext.protect.protection import Protection
from moevement_ext.recover.conversion import Conversion
from moevement_ext.recover.inventory import candidates
from moevement_ext.recover.outage import Phases
from moevement_ext.recover.rank_state import RankState
from moevement_ext.recover.sources import ArrivingWindow, make_room
from moevement_ext.recover.trainer import Received, Trainer
from moevement_ext.recover.verdict import Localized
from moevement_ext.recover.verification import Verification
from moevement_ext.replicate.client import LogReader, PeerLost, PeerRefused

logger = logger_of(__name__)


class WindowRefused(SparseCheckpointError):
    """This rank cannot get the data for a replay of the window; another window is tried next."""


class OtherBits(SparseCheckpointError):
    """The replay computed other bits than before, with which the job must not continue."""


class SourceLost(SparseCheckpointError):
    """The source of the window, or of a log, does not answer; all ranks search again."""


_DAMAGES = (RefusedWindow, CorruptLog, PeerRefused)


@dataclass(eq=False)
class StageReplay:
    """Replays the stage of this rank. Training thread only, except `interrupt`.

    `enters` is called with the name of each phase that begins; `trust_collectives` raises
    RoundEnded if another failure was announced, so that results may be invalid. `verification`
    compares the newest replay with earlier captures.
    """

    _rank: Rank
    _trainer: Trainer
    _protection: Protection
    _enters: Callable[[str], None]
    _trust_collectives: Callable[[], None]

    def __post_init__(self) -> None:
        self._lossy = self._rank.config.lossy
        self._waiting: list[LogReader | ArrivingWindow] = []
        self.replayed = 0
        self.verification = Verification.of_nothing()

    def interrupt(self) -> None:
        """Wake up a replay that waits for another rank. Watching thread."""
        for waiting in list(self._waiting):
            waiting.close()
        self._protection.memory.interrupt_fetch()

    def take_over_ledger(
        self,
        verdict: Localized,
        reports: Sequence[Report],
        stage_of: Sequence[int],
        broken: Callable[[], bool],
    ) -> None:
        """Fetch the ledger entries that this rank lacks for the recovery from survivors.

        A new process asks even if it lacks none: its node may still have the ledger of another
        attempt of the job. Ranks of its stage come first, as their entries fit its optimizers for
        certain. Iterations that its predecessor committed after the target are computed again.
        Entries that no reachable survivor has stay missing. `broken`: another failure came first.
        """
        number, target, memory = self._rank.number, verdict.target, self._protection.memory
        memory.ledger.forget_after(target)
        after = target - 1
        if verdict.window is not None and number in verdict.ranks:
            after = verdict.window.start
        trusts_own = reports[number].survivor
        silent = 0
        for other in self._survivors(reports, stage_of):
            has_all = len(memory.ledger.entries(after, target)) == target - after
            if (trusts_own and has_all) or broken() or silent == TRIES:
                return
            address = reports[other].address
            assert address is not None
            try:
                entries = memory.fetch_ledger(address, after, target)
            except (PeerLost, PeerRefused) as error:
                logger.warning('no ledger from rank %d: %s', other, error)
                silent += 1
                continue
            self._take_over(entries, stage_of[other] == stage_of[number])
            trusts_own = trusts_own or len(entries) == target - after

    def _survivors(self, reports: Sequence[Report], stage_of: Sequence[int]) -> list[int]:
        """Other ranks with a ledger, first those of this stage; each new process in its order."""
        number, world = self._rank.number, len(reports)
        others = [(number + step) % world for step in range(1, world)]
        survivors = [it for it in others if reports[it].survivor and reports[it].address]
        return sorted(survivors, key=lambda it: stage_of[it] != stage_of[number])

    def _take_over(self, entries: Sequence[LedgerEntry], of_stage: bool) -> None:
        """Merge a survivor's entries; where they replace this rank's, its loss is kept.

        An entry that the survivor contradicts was left on this node by another attempt of the job.
        """
        ledger = self._protection.memory.ledger
        for entry in entries:
            found = ledger.get(entry.iteration)
            if found is None or _contradicts(entry, found):
                ledger.append(entry)
            elif of_stage:
                ledger.append(msgspec.structs.replace(entry, loss=found.loss))

    def run(
        self,
        verdict: Localized,
        reports: Sequence[Report],
        iterate: Callable[[int], object],
        position: RankState,
        phases: Phases,
    ) -> None:
        """Bring this rank to `verdict.target`. Collective over the replaying ranks.

        `verdict` names a window; `iterate` runs the iteration after the given one, captures
        and commits it. Sets the seconds of `phases`.

        Raises:
            WindowRefused: this rank's part of the window, or a log that it needs, is damaged
                at every holder.
            OtherBits: the state differs, and `--sparse-ckpt-verify stop` forbids that.
            SourceLost: a source of the window or of a log does not answer.
        """
        assert verdict.window is not None
        faults.at_iteration(verdict.window.start + 1)
        faults.point(Phase.FETCH)
        self._enters('fetch')
        self._protection.checkpointer.drain()
        self.verification = self._verification(verdict.window.start, verdict.target)
        self._protection.checkpointer.stop_capturing()
        inventories = [report.windows for report in reports]
        held = {part for inventory in inventories for part in inventory}
        usable = candidates(held, len(reports))
        make_room(self._protection.memory.windows, verdict.window, usable)
        try:
            # Converted while later slots still arrive.
            source = ArrivingWindow(
                self._protection.memory, verdict.window, inventories, self._rank.identity
            )
            with self._waiting_for(source):
                self._replay(Conversion(source), verdict, iterate, position, phases)
        except (UnreadableWindow, PeerLost) as error:
            raise SourceLost(f'window {verdict.window.start}: {error}') from error
        except _DAMAGES as error:
            raise WindowRefused(f'window {verdict.window.start}: {error}') from error

    def _verification(self, start: int, target: int) -> Verification:
        """Verification of the replay after `start`, which takes gradient norms as given."""
        if self._rank.config.verify == OFF:
            return Verification.of_nothing()
        recorded = self._protection.memory.ledger.entries(start, target)
        return Verification(
            self._protection.captured_after(start),
            self._trainer.operators.slices,
            recorded
            if self._lossy
            else [msgspec.structs.replace(entry, grad_norms=[]) for entry in recorded],
        )

    def _replay(
        self,
        conversion: Conversion,
        verdict: Localized,
        iterate: Callable[[int], object],
        position: RankState,
        phases: Phases,
    ) -> None:
        began = time.perf_counter()
        start, target, trainer = conversion.window.start, verdict.target, self._trainer
        trainer.auxiliary_state.set_counters(conversion.first.state)
        trainer.auxiliary_state.move_data(conversion.first.state)
        phases.fetch = time.perf_counter() - began
        self._enters('convert')
        with nullcontext() if verdict.together else self._from_logs(start, target):
            conversion.run(trainer, self.verification)
            self._trust_collectives()
            position.reached(conversion.last)
            self.verification.check(conversion.last.iteration)
            if self._protection.stops:
                self._protection.checkpointer.roll_back(target - 1)  # captures nothing until then
            else:
                self._roll_back(conversion)
            phases.convert = time.perf_counter() - began - phases.fetch
            self._enters('catch-up')
            self._catch_up(conversion.last.iteration, target, iterate)
            if self.verification.forbids(self._rank.config.verify):
                verified = self.verification.result()
                raise OtherBits(f'window {start}, replayed to iteration {target}: {verified}')
            if self._protection.stops:
                self._roll_back(conversion)
            position.rebuilt()
        self.replayed = target - start
        phases.catch_up = time.perf_counter() - began - phases.fetch - phases.convert

    def _roll_back(self, conversion: Conversion) -> None:
        lost = self._protection.roll_back(conversion.window, conversion.file())
        self.verification.tokens_lost = lost

    def _catch_up(self, dense_at: int, target: int, iterate: Callable[[int], object]) -> None:
        """Continue from the dense state with the ledger's records of the iterations."""
        state = self._trainer.auxiliary_state
        with self._trainer.replaying():  # nothing is frozen, but nothing overlaps either
            for iteration in range(dense_at, target):
                faults.at_iteration(iteration + 1)
                faults.point(Phase.CATCH_UP)
                entry = self._entry(iteration + 1)
                # Evaluations are not repeated here, but the captured states count them.
                state.count(iteration, None, entry.consumed_valid)
                # Other experts reduce to values that differ from the recorded ones.
                with nullcontext() if self._lossy else self._trainer.reduced(entry):
                    iterate(iteration)
                state.count(entry.iteration, entry.consumed_samples)

    def _entry(self, iteration: int) -> LedgerEntry:
        entry = self._protection.memory.ledger.get(iteration)
        if entry is None:
            raise WindowRefused(
                f'no reachable rank has a record of iteration {iteration}, so it cannot be replayed'
            )
        return entry

    @contextmanager
    def _from_logs(self, start: int, target: int) -> Iterator[None]:
        received: dict[Direction, Received] = {}
        pipeline = self._trainer.pipeline
        with ExitStack() as stack:
            for direction, neighbour in pipeline.neighbours.items():
                counts = [
                    (t, pipeline.receives(self._entry(t))[direction])
                    for t in range(start + 1, target + 1)
                ]
                if any(count for _, count in counts):
                    assert neighbour is not None
                    client = self._protection.memory.client(neighbour)
                    reader = LogReader(client, direction, counts)
                    received[direction] = stack.enter_context(self._waiting_for(reader))
            stack.enter_context(pipeline.replaying(received))
            yield

    @contextmanager
    def _waiting_for[W: (LogReader, ArrivingWindow)](self, waiting: W) -> Iterator[W]:
        """Within the context `interrupt` ends `waiting`; an earlier failure is checked here."""
        self._waiting.append(waiting)
        try:
            self._trust_collectives()
            yield waiting
        finally:
            self._waiting.remove(waiting)
            waiting.close()


def _contradicts(entry: LedgerEntry, found: LedgerEntry) -> bool:
    """Return True if both are of one iteration, but of different attempts of the job."""
    alike = len(entry.grad_norms) == len(found.grad_norms)
    return (
        alike and len(entry.overflows) == len(found.overflows) and entry.shared() != found.shared()
    )
