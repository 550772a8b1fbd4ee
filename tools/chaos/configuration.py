# SPDX-License-Identifier: Apache-2.0
"""The configuration of a job, Megatron's features included: from flags, or drawn from a seed."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moevement_ext.config import REPORT, STOP

from ..lab import models, precisions
from ..lab.job import Kind
from ..lab.launch import PROGRAM, Launch, Launcher, as_flags

RUN_ID = 'chaos'

SAMPLES = 4
"""Samples of an iteration; of the first one if the batch grows."""
_RAMP_TO = 2 * SAMPLES
_RAMP_SAMPLES = 10 * SAMPLES
_LAYERS = 4
SEQUENCE = 32
_MODEL = models.ToyModel(hidden=32, heads=2, sequence=SEQUENCE, experts=4)
# The clip is far below the gradient norm, so it acts in every step; the learning rate warms up and
# decays.
_TRAINING = '--micro-batch-size 1 --lr 2e-3 --min-lr 1e-4 --clip-grad 0.5'.split()
COMMON_FLAGS = [*_MODEL.flags(), *models.TRAINING, *_TRAINING, *models.TEXT]
_FLAGS = {
    **precisions.FLAGS,
    # The scale grows every second step, so that many steps overflow and are skipped.
    'skips': '--initial-loss-scale 2048 --loss-scale-window 2 --hysteresis 1',
    'first': SAMPLES,
    'then': _RAMP_TO,
    'tokens': _RAMP_SAMPLES * SEQUENCE,
}


class _Decks(msgspec.Struct, forbid_unknown_fields=True):
    """See the file."""

    layouts: list[str]
    without_spares: list[tuple[str, str, str]]
    precisions: dict[str, str]
    features: dict[str, tuple[str, str]]
    faults: dict[Kind, int]


_DECKS = msgspec.toml.decode(
    Path(__file__).with_name('configuration.toml').read_bytes(), type=_Decks
)
FEATURES = tuple(_DECKS.features)
WITHOUT_SPARES = _DECKS.without_spares
FAULTS = _DECKS.faults
_SAVES = SAVE, ASYNC_SAVE = 'dense-save', 'async-save'
RAMP_UP = 'ramp-up'
BF16 = 'bf16-distributed'
_DELAYED = 'c3', 'c4', 'c5'
NARROW = 'c1', 'c2', *_DELAYED
"""Precisions that need Transformer Engine, or stand-ins for it."""
WIDE = tuple(name for name in _DECKS.precisions if name not in NARROW)
# Upstream's dense checkpoints do not hold all bits of narrow state; the stand-ins would count a
# recomputed pass twice.
_NOT_NARROW = {*_SAVES, 'recompute'}


class Layout(NamedTuple):
    """Distribution of the model over ranks."""

    name: str
    pp: int = 1
    vp: int = 1
    """Model chunks on each pipeline stage."""
    tp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.pp * self.tp * self.dp

    def flags(self) -> list[str]:
        chunks = self.pp * self.vp
        layers = math.ceil(_LAYERS / chunks) * chunks
        flags = f'--num-layers {layers} --pipeline-model-parallel-size {self.pp} '
        flags += f'--expert-model-parallel-size {self.ep} '
        if self.tp > 1:
            flags += f'--tensor-model-parallel-size {self.tp} --sequence-parallel '
        if self.vp > 1:
            flags += f'--num-layers-per-virtual-pipeline-stage {layers // chunks}'
        return flags.split()


def parse_layout(text: str) -> Layout:
    """A layout such as `pp2-ep2`; the ranks of `ep` are data-parallel too."""
    sizes = {part[:2]: int(part[2:]) for part in text.split('-')}
    return Layout(text, **{'dp': sizes.get('ep', 1), **sizes})


AUTO = 'auto'
LONGEST_WINDOW = 6
_RESTLESS = f'max_window = {LONGEST_WINDOW}\nreorder_change = 0\nreorder_fraction = 0.01'
HANG_TIMEOUT_S = 5
# Seconds per rank: training threads wait while upstream starts processes that write checkpoints, on
# this machine for all ranks at once.
_STUCK_TIMEOUT_OF_A_WRITER_S = 15


class Configuration(NamedTuple):
    """Configuration of a job; disturbed jobs and the plain one share it."""

    layout: Layout
    precision: str
    features: tuple[str, ...]
    window: int | str
    """Iterations per window, or `AUTO`, which also replans at every change of popularity."""
    nodes: int
    replicas: int = 1
    spares: int = 1
    launcher: Launcher = Launcher.LOCAL
    share_gpu: bool = False
    hang_timeout_s: int = HANG_TIMEOUT_S
    verify: str = REPORT
    disk: bool = False
    guests: bool = False
    """Nodes are lost for good; at most `replicas` of them are away."""
    recovery: str = AUTO

    def __str__(self) -> str:
        features = ', '.join(self.features) or 'no features'
        return (
            f'{self.layout.name} {self.precision}, window {self.window}, {self.nodes} nodes, '
            f'replicas {self.replicas}, spares {self.spares}, {self.launcher}, '
            f'verify {self.verify}{", disk" if self.disk else ""}'
            f'{f", guests, {self.recovery}" if self.guests else ""}: {features}'
        )

    @property
    def workers_per_node(self) -> int:
        return self.layout.ranks // self.nodes

    @property
    def longest_window(self) -> int:
        return self.window if isinstance(self.window, int) else LONGEST_WINDOW

    def launch(self, folder: Path, flags: list[str], max_restarts: int = 0) -> Launch:
        """Without restarts, the job has no spares either."""
        narrow = self.precision in NARROW
        program = precisions.program(stand_ins=not self.share_gpu) if narrow else PROGRAM
        return Launch(
            folder,
            flags,
            nodes=self.nodes,
            workers_per_node=self.workers_per_node,
            max_restarts=max_restarts,
            spares=self.spares if max_restarts else 0,
            settings=_RESTLESS if self.window == AUTO else '',
            share_gpu=self.share_gpu,
            guests=self.guests,
            program_file=program,
        )

    def kinds(self) -> list[Kind]:
        # A new launcher has all nodes; ranks whose peers compute for them load no data.
        impossible = {Kind.JOB, Kind.STUCK} if self.guests else {Kind.AWAY, Kind.BACK}
        if self.launcher is not Launcher.TORCHRUN:
            impossible.add(Kind.AGENT)
        return [kind for kind in Kind if kind not in impossible]

    @property
    def _stuck_timeout_s(self) -> int:
        saves = not set(_SAVES).isdisjoint(self.features)
        writers_s = _STUCK_TIMEOUT_OF_A_WRITER_S * self.layout.ranks if saves else 0
        return max(2 * self.hang_timeout_s, writers_s)

    def training_flags(self, data: Path, iterations: int, folder: Path) -> list[str]:
        features = (both[name not in self.features] for name, both in _DECKS.features.items())
        words = [_DECKS.precisions[self.precision], *features]
        return [
            *COMMON_FLAGS,
            *' '.join(words).format(run=folder, **_FLAGS).split(),
            *(precisions.ENGINE if self.share_gpu and self.precision in NARROW else ()),
            *self.layout.flags(),
            *self._length(iterations).split(),
            *models.data_flags(data),
        ]

    def sparse_flags(self, memory: Path, folder: Path) -> list[str]:
        own = as_flags(
            sparse_ckpt_replicas=self.replicas,
            sparse_ckpt_verify=self.verify,
            sparse_ckpt_recovery=self.recovery,
            sparse_ckpt_hang_timeout=self.hang_timeout_s,
            sparse_ckpt_stuck_timeout=self._stuck_timeout_s,
            sparse_ckpt_disk=folder.with_name(f'{folder.name}-disk') if self.disk else None,
            sparse_ckpt_disk_every=LONGEST_WINDOW if self.disk else None,
        )
        return [*models.sparse_flags(memory, RUN_ID, self.window, folder / 'events'), *own]

    def _length(self, iterations: int) -> str:
        """Flags for the length: in samples if the batch grows, as upstream requires."""
        if RAMP_UP not in self.features:
            return f'--train-iters {iterations} --lr-warmup-iters 3 --lr-decay-iters 200'
        first = _RAMP_SAMPLES // SAMPLES
        samples = _RAMP_SAMPLES + (iterations - first) * _RAMP_TO
        decay = 200 * _RAMP_TO
        return f'--train-samples {samples} --lr-warmup-samples 24 --lr-decay-samples {decay}'


_BLOCK = 10
# Of each ten configurations, the number with a given feature.
_OF_BLOCK = 4


def draw_configuration(
    seed: int, number: int, attempt: int = 0, narrow: bool = False
) -> Configuration:
    """Draw a configuration from a seed.

    Draws come from shuffled decks, so that twenty configurations have every layout, precision and
    feature.

    Args:
        seed: seed of all draws.
        number: number of the configuration, from 0.
        attempt: counts the configurations that upstream refused.
        narrow: half of the configurations get state of 16 and 8 bits; others are drawn as without
            it.
    """
    rng = random.Random(f'{seed} configuration {number} {attempt}')
    block, place = divmod(number, _BLOCK)

    def shuffled(what: str, deck: Sequence) -> list:
        return random.Random(f'{seed} {what} {block} {attempt}').sample(deck, len(deck))

    def deal(what: str, *deck: object) -> Any:
        return shuffled(what, deck)[place]

    def chosen(what: str, often: int = _OF_BLOCK) -> bool:
        return place in shuffled(what, range(_BLOCK))[:often]

    layout = parse_layout(deal('layout', *_DECKS.layouts))
    precision = deal('precision', *WIDE, *WIDE, BF16, BF16)
    if layout.dp > layout.ep and precision == BF16:
        precision = 'bf16'  # the only one with equal state on data-parallel ranks
    replaced = deal('narrow', *NARROW, *[None] * (_BLOCK - len(NARROW))) if narrow else None
    if replaced is not None:
        precision, layout = replaced, _layout_for(replaced, layout)
    save = deal('save', *[SAVE] * 3, *[ASYNC_SAVE] * 2, *[None] * 5)
    without = _NOT_NARROW if replaced else ()
    features = [
        one
        for one in FEATURES
        if (one == save if one in _SAVES else chosen(one) and _allowed(one, layout))
        and one not in without
    ]
    launcher = Launcher.TORCHRUN if chosen('launcher', 1) else Launcher.LOCAL
    nodes = layout.ranks
    if launcher is Launcher.LOCAL and nodes >= 4:
        nodes = rng.choice((nodes, nodes // 2))
    return Configuration(
        layout=layout,
        precision=precision,
        features=tuple(features),
        window=deal('window', *range(1, LONGEST_WINDOW + 1), AUTO, AUTO, 2, 4),
        nodes=nodes,
        replicas=min(rng.choice((1, 1, 2)), nodes - 1),
        spares=rng.randint(0, 2) if launcher is Launcher.LOCAL else 0,
        launcher=launcher,
        verify=deal('verify', *(REPORT, STOP) * (_BLOCK // 2)),
        disk=chosen('disk'),
    )


def draw_without_spares(seed: int, number: int) -> Configuration:
    """Draw a job on four nodes that are lost for good; layouts come from a shuffled deck."""
    shuffled = random.Random(f'{seed} layout').sample(WITHOUT_SPARES, len(WITHOUT_SPARES))
    layout, precision, recovery = shuffled[number % len(shuffled)]
    rng = random.Random(f'{seed} without spares {number}')
    return Configuration(
        layout=parse_layout(layout),
        precision=precision,
        features=('dropout',),
        window=rng.randint(1, LONGEST_WINDOW),
        nodes=4,
        replicas=rng.randint(1, 2),
        guests=True,
        recovery=recovery,
    )


def _layout_for(precision: str, layout: Layout) -> Layout:
    """The layout, or another one that the precision supports.

    With delayed scaling upstream leaves scales stale on data-parallel ranks, and refuses virtual
    stages; the stand-ins do not split fp8 weights.
    """
    if precision in _DELAYED:
        return parse_layout('pp4')
    return parse_layout('pp2-ep2') if layout.tp > 1 or layout.vp > 1 else layout


def _allowed(feature: str, layout: Layout) -> bool:
    """True if upstream accepts a feature with a layout.

    A growing batch must be a whole number of micro-batches on every data-parallel rank, and with
    virtual stages also a whole number of rounds through the pipeline.
    """
    micro_batches, rest = divmod(SAMPLES, layout.dp)
    whole = not rest and (layout.vp == 1 or micro_batches % layout.pp == 0)
    return feature != RAMP_UP or whole
