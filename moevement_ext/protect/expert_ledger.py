# SPDX-License-Identifier: Apache-2.0
"""Counts routed tokens and checkpointed versions of experts, for a lossy strategy.

A checkpoint contains all experts. Those that are not selected are copied from the previous
checkpoint (its *base*) instead of the training state. Versions and token counts are stored in the
window, so a rank that rolls back to it, or joins, continues counting from there. The base is part
of a window's name: copies of different versions never count as one window. A window that is
captured again after a recovery gets another name, since its experts have learned from fewer tokens.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec
import xxhash

from moevement_ext.capture.layout import Operators, SlotLayout
from moevement_ext.config import ConfigurationError
from moevement_ext.events import TokensLost
from moevement_ext.membership.rank import Rank
from moevement_ext.memory.mapped_file import Bytes
from moevement_ext.memory.window import slot
from moevement_ext.memory.window.file import WindowFile
from moevement_ext.memory.window.format import damaged
from moevement_ext.memory.window.name import WindowName
from moevement_ext.plan.replanning import Cycle, TokenCounter, WindowLoad
from moevement_ext.plan.strategy.choice import LossyStrategy, lossy_strategy

_LOSSY_LINE = (
    ' sparse ckpt | strategy {strategy} is lossy: a recovery loses what experts have learned since '
    'their newest copy, and says how many tokens that were |'
)
# Encoded bytes per expert in a context, without its name: three numbers and their frame.
_BYTES_OF_COPY = 36


class Checkpoint(NamedTuple):
    """Experts and their versions in one checkpoint."""

    digest: str
    copies: slot.ExpertCopies
    older: frozenset[str]
    """Operators whose bytes come from an earlier checkpoint."""
    base: WindowFile | None
    """File of the previous checkpoint, which has the bytes of `older`."""

    def older_bytes(self, layout: SlotLayout) -> int:
        """Return the bytes of a slot that are not copied from the training state."""
        return sum(slot.align_up(record.nbytes) for record in layout.left_out(self.older))

    def take_older(self, layout: SlotLayout, payload: Bytes) -> slot.Kept | None:
        """Copy the omitted operators from the base, and return their ranges. Sealing thread.

        Raises `RefusedWindow` if the base's bytes do not match their checksum.
        """
        if self.base is None or not self.older:
            return None
        ranges: list[slot.Range] = []
        content = self.base.payload(0)
        known = {record.key: record for record in self.base.header(0).records}
        for record in layout.left_out(self.older):
            source = known[record.key]
            part = payload[record.offset : record.offset + record.nbytes]
            part[:] = content[source.offset : source.offset + source.nbytes]
            if xxhash.xxh3_64_intdigest(memoryview(part)) != source.checksum:
                raise damaged(self.base.path, 0, source)
            ranges.append((record.offset, source.offset, slot.align_up(record.nbytes)))
        return slot.Kept(self.base.required_name(), slot.merged(ranges))


def refuse_too_many(most: int | str, of: int | None) -> None:
    """Refuse more experts in a checkpoint than the `of` of a layer, if known."""
    if of is not None and isinstance(most, int) and most > of:
        raise ConfigurationError(
            f'--sparse-ckpt-experts {most} must be at most the number of experts of a layer, {of}.'
        )


class ExpertLedger:
    """The ledger of one rank. Training thread only.

    `own` has the bytes of each expert of this rank in a checkpoint, `others` those of the other
    operators. Raises `ConfigurationError` if an expert's tokens are not counted, or a layer has
    fewer than K experts.
    """

    def __init__(
        self,
        counter: TokenCounter,
        strategy: LossyStrategy,
        own: Mapping[str, int],
        others: int = 0,
    ) -> None:
        self._counter = counter
        self._strategy = strategy
        self._routed = dict.fromkeys(counter.take(), 0.0)
        layers: dict[str, list[str]] = {}
        for name in self._routed:
            layers.setdefault(name.rpartition('.')[0], []).append(name)
        self._layers = list(layers.values())
        self._since: int | None = None
        self._counted = 0  # iterations
        self._lost = 0.0
        self._bytes = sum(own.values()), others
        self._of_cycle: dict[str, float] = {}
        # Token counts, and the window, of the newest rollback.
        self._restored: dict[str, float] = {}
        self._from: WindowName | None = None
        # Number of experts, and share of tokens lost before it, that the job had reached then.
        self._reached = 0, 0.0
        self._check(own, strategy.first().experts)

    def _check(self, own: Collection[str], most: int) -> None:
        if unknown := sorted(set(own) - self._routed.keys()):
            raise ConfigurationError(
                f'--sparse-ckpt-strategy: the tokens of {unknown[0]} are not counted: take a '
                'strategy that copies all experts, such as gemini.'
            )
        refuse_too_many(most, min(map(len, self._layers), default=None))

    @property
    def context_bytes(self) -> int:
        """Bytes that the experts' versions and counts need in a slot's context."""
        return sum(len(name) + _BYTES_OF_COPY for name in self._routed) + 3 * _BYTES_OF_COPY

    def load(self, measured: WindowLoad, last: int, by_expert: bool, holders: int) -> WindowLoad:
        """Add the experts' figures to the measurements of a cycle.

        `last` is the last iteration of training, `holders` the number of peers that receive
        the checkpoints. `by_expert` includes the tokens of each expert.
        """
        tokens, self._of_cycle = self._of_cycle, {}
        return msgspec.structs.replace(
            measured,
            tokens=tokens if by_expert else {},
            lost=self._lost,
            expected=self._expected(last),
            experts=max(map(len, self._layers), default=0),
            stage_experts=len(self._routed),
            expert_bytes=self._bytes[0],
            other_bytes=self._bytes[1],
            holders=holders,
            restored=self._reached,
        )

    def _expected(self, last: int) -> float:
        """Extrapolate the tokens of the whole training from those counted so far."""
        return sum(self._routed.values()) / self._counted * last if self._counted else 0.0

    def begins(self) -> None:
        """Begin an iteration. Counts of an interrupted iteration are discarded."""
        self._counter.counting = False
        self._counter.take()
        self._counter.counting = True

    def ends(self) -> None:
        """Add the counts of a committed iteration. Waits for the device."""
        self._counted += 1
        tokens = self._counter.take()
        self._counter.counting = False
        for name, count in tokens.items():
            self._routed[name] += count
            self._of_cycle[name] = self._of_cycle.get(name, 0.0) + count

    def base(self, persisted: WindowName | None) -> WindowName | None:
        """The newest window that all ranks have, the source of older copies."""
        known = [name for name in (persisted, self._from) if name is not None]
        return max(known, key=lambda name: name.start, default=None)

    def checkpoint(
        self, cycle: Cycle, iteration: int, base: WindowName | None, file: WindowFile | None
    ) -> Checkpoint:
        """Select the experts of the checkpoint of `iteration`.

        `base` is the previous window, in `file`; if None, all experts are copied from the
        state. Raises `ValueError` if the file of `base` is gone.
        """
        if self._since is None:
            self._since = iteration
        before: dict[str, slot.ExpertCopy] = {}
        if base is not None:
            if file is None:
                raise ValueError(
                    f'window {base}, which has the experts that are not copied, is gone'
                )
            before = _copies(file.header(0)).experts
        ages = {name: iteration - copy.version for name, copy in before.items()}
        chosen = set(self._routed)
        if before and cycle.experts:
            chosen = set(self._strategy.choose(self._layers, cycle, iteration, ages))
        experts = {
            name: slot.ExpertCopy(iteration, routed, routed)
            if name in chosen
            else self._as_before(name, before[name])
            for name, routed in self._routed.items()
        }
        reached = max(self._reached, (cycle.experts, cycle.lost))
        copies = slot.ExpertCopies(experts, self._since, self._lost, *reached)
        digest = self._digest(cycle, base)
        return Checkpoint(digest, copies, older=copies.older_than(iteration), base=file)

    def _as_before(self, name: str, copy: slot.ExpertCopy) -> slot.ExpertCopy:
        learned = max(copy.learned, self._restored.get(name, 0.0))
        return slot.ExpertCopy(copy.version, learned, self._routed[name])

    def _digest(self, cycle: Cycle, base: WindowName | None) -> str:
        parts = [cycle.digest, base, base is not None and base == self._from]
        return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(parts))

    def go_back(self, header: slot.SlotHeader, last: int) -> TokensLost:
        """Continue counting from a window after a rollback to it; returns the lost tokens.

        `header` is that of the window's slot, `last` the last iteration of training.
        """
        copies = _copies(header)
        self._routed = {name: copy.routed for name, copy in copies.experts.items()}
        self._restored = dict(self._routed)
        self._since, self._from = copies.since, header.name
        self._counted = header.iteration - copies.since
        self._lost = copies.lost + copies.unsaved
        self._reached = copies.most, copies.lost_before
        if self._strategy.makes_up:
            lost = {name: copy.routed - copy.learned for name, copy in copies.experts.items()}
            self._counter.make_up(lost)
        expected = self._expected(last)
        return TokensLost(
            start=header.iteration,
            versions={name: copy.version for name, copy in copies.experts.items()},
            tokens=copies.unsaved,
            lost=self._lost,
            share=self._lost / expected if expected else 0.0,
        )


def expert_ledger(rank: Rank, tokens: TokenCounter, operators: Operators) -> ExpertLedger:
    """The ledger of a job with a lossy strategy; rank 0 prints that the strategy is lossy."""
    if rank.number == 0 and not rank.exchange.joining:
        print(_LOSSY_LINE.format(strategy=rank.config.strategy), flush=True)
    sizes = {name: held.full_bytes for name, held in operators.slices.items()}
    own = {name: sizes[name] for name, kind in operators.kinds.items() if kind == 'expert'}
    others = sum(sizes.values()) - sum(own.values())
    return ExpertLedger(tokens, lossy_strategy(rank.config), own, others)


def _copies(header: slot.SlotHeader) -> slot.ExpertCopies:
    copies = slot.decode_context(header.context).copies
    if copies is None:
        raise ValueError(f'window {header.name} has no data about its experts')
    return copies
