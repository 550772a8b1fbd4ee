# SPDX-License-Identifier: Apache-2.0
"""The configuration of a job, Megatron's features included: from flags, or drawn from a seed."""

import enum
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from moevement_ext.config import REPORT, STOP, UNFLAGGED

from ..lab import models, precisions
from ..lab.job import Kind
from ..lab.launch import PROGRAM, Launch, Launcher

RUN_ID = 'chaos'

SAMPLES = 4
"""Samples of an iteration; of the first one if the batch grows."""
_LAYERS = 4
SEQUENCE = 32
_MODEL = models.ToyModel(hidden=32, heads=2, sequence=SEQUENCE, experts=4)
# The clip is far below the gradient norm, so it acts in every step; the learning rate warms up and
# decays.
_TRAINING = '--micro-batch-size 1 --lr 2e-3 --min-lr 1e-4 --clip-grad 0.5'.split()
COMMON_FLAGS = [*_MODEL.flags(), *models.TRAINING, *_TRAINING, *models.TEXT]


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
        flags = ['--num-layers', str(layers)]
        flags += ['--pipeline-model-parallel-size', str(self.pp)]
        flags += ['--expert-model-parallel-size', str(self.ep)]
        if self.tp > 1:
            flags += ['--tensor-model-parallel-size', str(self.tp), '--sequence-parallel']
        if self.vp > 1:
            flags += ['--num-layers-per-virtual-pipeline-stage', str(layers // chunks)]
        return flags


def parse_layout(text: str) -> Layout:
    """A layout such as `pp2-ep2`; the ranks of `ep` are data-parallel too."""
    sizes = {part[:2]: int(part[2:]) for part in text.split('-')}
    return Layout(text, **{'dp': sizes.get('ep', 1), **sizes})


AUTO = 'auto'
LONGEST_WINDOW = 6
HANG_TIMEOUT_S = 5
# Seconds per rank: training threads wait while upstream starts processes that write checkpoints, on
# this machine for all ranks at once.
_STUCK_TIMEOUT_OF_A_WRITER_S = 15

_BLOCK = 10
# Of each ten configurations, the number with a given feature.
_OF_BLOCK = 4
_RAMP_TO = 2 * SAMPLES
_RAMP_SAMPLES = 10 * SAMPLES
_RAMP_TOKENS = _RAMP_SAMPLES * SEQUENCE


class Feature(enum.StrEnum):
    """A feature of Megatron that is on or off."""

    EVALUATION = 'evaluation'
    SAVE = 'dense-save'
    ASYNC_SAVE = 'async-save'
    DROPOUT = 'dropout'
    JITTER = 'router-jitter'
    CAPACITY = 'capacity-drop'
    RECOMPUTE = 'recompute'
    LOADER_WORKERS = 'loader-workers'
    TENSORBOARD = 'tensorboard'
    RAMP_UP = 'ramp-up'
    TIED = 'tied'


class Precision(enum.StrEnum):
    """Data type of the parameters, and whether the optimizer is distributed."""

    BF16 = 'bf16-distributed'
    BF16_PLAIN = 'bf16'
    FP32 = 'fp32'
    FP16 = 'fp16-skips'
    C1 = 'c1'
    """Precisions C1 to C5 of the paper's Table 7 need Transformer Engine, or stand-ins for it."""
    C2 = 'c2'
    C3 = 'c3'
    C4 = 'c4'
    C5 = 'c5'


_SKIPS = '--initial-loss-scale 2048 --loss-scale-window 2 --hysteresis 1'
_DELAYED = Precision.C3, Precision.C4, Precision.C5
_NARROW = Precision.C1, Precision.C2, *_DELAYED
_NOT_NARROW = frozenset(
    (
        Feature.SAVE,  # upstream's dense checkpoints do not hold all bits of narrow state
        Feature.ASYNC_SAVE,
        Feature.RECOMPUTE,  # the stand-ins would count a pass twice
    )
)
_PRECISION = {
    Precision.BF16: '--bf16 --use-distributed-optimizer',
    Precision.BF16_PLAIN: '--bf16',
    Precision.FP32: '',
    # The scale grows every second step, so that many steps overflow and are skipped.
    Precision.FP16: f'--fp16 --use-distributed-optimizer {_SKIPS}',
    Precision.C1: f'{precisions.FLAGS["c1"]} {_SKIPS}',
    **{one: precisions.FLAGS[one] for one in (Precision.C2, *_DELAYED)},
}
_ON = {
    Feature.EVALUATION: '--eval-interval 5 --eval-iters 2',
    Feature.SAVE: '--save {run}/dense --load {run}/dense --save-interval 7',
    Feature.ASYNC_SAVE: '--save {run}/dense --load {run}/dense --save-interval 7 --async-save '
    '--async-strategy mcore --use-persistent-ckpt-worker',
    Feature.DROPOUT: '--hidden-dropout 0.1 --attention-dropout 0.1',
    Feature.JITTER: '--moe-input-jitter-eps 1e-2',
    Feature.CAPACITY: '--moe-expert-capacity-factor 1.0',
    Feature.RECOMPUTE: '--recompute-granularity full --recompute-method uniform '
    '--recompute-num-layers 1',
    Feature.LOADER_WORKERS: '--num-workers 2',
    Feature.TENSORBOARD: '--tensorboard-dir {run}/tensorboard --tensorboard-log-interval 1',
    Feature.RAMP_UP: f'--step-batch-size-schedule 0:{SAMPLES},{_RAMP_TOKENS}:{_RAMP_TO}',
    Feature.TIED: '',
}
_OFF = {
    Feature.EVALUATION: '--eval-interval 1000000 --eval-iters 0',
    Feature.DROPOUT: '--hidden-dropout 0 --attention-dropout 0',
    Feature.LOADER_WORKERS: '--num-workers 0',
    Feature.RAMP_UP: f'--global-batch-size {SAMPLES}',
    Feature.TIED: '--untie-embeddings-and-output-weights',
}
_RESTLESS = f'max_window={LONGEST_WINDOW} reorder_change=0 reorder_fraction=0.01'
_LAYOUTS = (
    'pp2-ep2', 'pp2-ep2', 'pp4', 'pp2-dp2', 'pp2-dp2', 'pp2-ep2-vp2', 'pp2-tp2', 'pp3', 'ep2',
    'pp4-ep2',
)  # fmt: skip
_SAVES = [Feature.SAVE] * 3 + [Feature.ASYNC_SAVE] * 2 + [None] * 5
_WIDE = [one for one in Precision if one not in _NARROW]
_PRECISIONS = [*_WIDE, *_WIDE, Precision.BF16, Precision.BF16]
_OFTEN = len(_PRECISIONS) - len(_NARROW)


class Configuration(NamedTuple):
    """Configuration of a job; disturbed jobs and the plain one share it."""

    layout: Layout
    precision: Precision
    features: tuple[Feature, ...]
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

    def __str__(self) -> str:
        features = ', '.join(self.features) or 'no features'
        return (
            f'{self.layout.name} {self.precision}, window {self.window}, {self.nodes} nodes, '
            f'replicas {self.replicas}, spares {self.spares}, {self.launcher}, '
            f'verify {self.verify}{", disk" if self.disk else ""}: {features}'
        )

    @property
    def workers_per_node(self) -> int:
        return self.layout.ranks // self.nodes

    @property
    def longest_window(self) -> int:
        return self.window if isinstance(self.window, int) else LONGEST_WINDOW

    def launch(
        self, folder: Path, flags: list[str], max_restarts: int = 0, spares: int = 0
    ) -> Launch:
        narrow = self.precision in _NARROW
        program = precisions.program(stand_ins=not self.share_gpu) if narrow else PROGRAM
        variables = {UNFLAGGED: _RESTLESS} if self.window == AUTO else {}
        return Launch(
            folder, flags, self.nodes, self.workers_per_node, max_restarts, spares, variables,
            self.share_gpu, program_file=program,
        )  # fmt: skip

    def kinds(self) -> list[Kind]:
        agents = self.launcher is Launcher.TORCHRUN
        return [kind for kind in Kind if agents or kind is not Kind.AGENT]

    def detection_s(self, kind: Kind) -> float:
        """Seconds until a fault of this kind is noticed."""
        return {Kind.STOP: self.hang_timeout_s, Kind.STUCK: self._stuck_timeout_s}.get(kind, 0)

    @property
    def _stuck_timeout_s(self) -> int:
        saves = Feature.SAVE in self.features or Feature.ASYNC_SAVE in self.features
        return max(
            2 * self.hang_timeout_s,
            _STUCK_TIMEOUT_OF_A_WRITER_S * self.layout.ranks if saves else 0,
        )

    def training_flags(self, data: Path, iterations: int, folder: Path) -> list[str]:
        features = [
            (_ON[feature] if feature in self.features else _OFF.get(feature, '')).format(run=folder)
            for feature in Feature
        ]
        return [
            *COMMON_FLAGS,
            *_PRECISION[self.precision].split(),
            *(precisions.ENGINE if self.share_gpu and self.precision in _NARROW else ()),
            *self.layout.flags(),
            *' '.join(features).split(),
            *self._length(iterations).split(),
            *models.data_flags(data),
        ]

    def sparse_flags(self, memory: Path, events: Path) -> list[str]:
        flags = models.sparse_flags(memory, RUN_ID, self.window, events)
        flags += ['--sparse-ckpt-replicas', str(self.replicas)]
        flags += ['--sparse-ckpt-hang-timeout', str(self.hang_timeout_s)]
        flags += ['--sparse-ckpt-verify', self.verify]
        if self.disk:
            flags += ['--sparse-ckpt-disk', str(self.disk_of(events.parent))]
            flags += ['--sparse-ckpt-disk-every', str(LONGEST_WINDOW)]
        return [*flags, '--sparse-ckpt-stuck-timeout', str(self._stuck_timeout_s)]

    @staticmethod
    def disk_of(folder: Path) -> Path:
        """Folder of windows on disk, next to the job's folder."""
        return folder.with_name(f'{folder.name}-disk')

    def _length(self, iterations: int) -> str:
        """Flags for the length: in samples if the batch grows, as upstream requires."""
        if Feature.RAMP_UP not in self.features:
            return f'--train-iters {iterations} --lr-warmup-iters 3 --lr-decay-iters 200'
        first = _RAMP_SAMPLES // SAMPLES
        samples = _RAMP_SAMPLES + (iterations - first) * _RAMP_TO
        decay = 200 * _RAMP_TO
        return f'--train-samples {samples} --lr-warmup-samples 24 --lr-decay-samples {decay}'


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

    def deal(what: str, deck: Sequence) -> list:
        block = random.Random(f'{seed} {what} {number // _BLOCK} {attempt}')
        return block.sample(deck, len(deck))

    place = number % _BLOCK
    layout = parse_layout(deal('layout', _LAYOUTS)[place])
    precision = deal('precision', _PRECISIONS)[place]
    if layout.dp > layout.ep and precision is Precision.BF16:
        precision = Precision.BF16_PLAIN  # the only one with equal state on data-parallel ranks
    if narrow:
        replaced = deal('narrow', [*_NARROW, *[None] * _OFTEN])[place]
        if replaced is not None:
            precision, layout = replaced, _layout_for(replaced, layout)
    save = deal('save', _SAVES)[place]
    features = [
        feature
        for feature in Feature
        if feature is save
        or feature not in _SAVES
        and place in deal(feature, range(_BLOCK))[:_OF_BLOCK]
        and allowed(feature, layout)
    ]
    if precision in _NARROW:
        features = [feature for feature in features if feature not in _NOT_NARROW]
    launcher = Launcher.TORCHRUN if place in deal('launcher', range(_BLOCK))[:1] else Launcher.LOCAL
    nodes = layout.ranks
    if launcher is Launcher.LOCAL and nodes >= 4:
        nodes = rng.choice((nodes, nodes // 2))
    return Configuration(
        layout=layout,
        precision=precision,
        features=tuple(features),
        window=deal('window', [*range(1, LONGEST_WINDOW + 1), AUTO, AUTO, 2, 4])[place],
        nodes=nodes,
        replicas=min(rng.choice((1, 1, 2)), nodes - 1),
        spares=rng.randint(0, 2) if launcher is Launcher.LOCAL else 0,
        launcher=launcher,
        verify=deal('verify', (REPORT, STOP) * (_BLOCK // 2))[place],
        disk=place in deal('disk', range(_BLOCK))[:_OF_BLOCK],
    )


def _layout_for(precision: Precision, layout: Layout) -> Layout:
    """The layout, or another one that the precision supports.

    With delayed scaling upstream leaves scales stale on data-parallel ranks, and refuses virtual
    stages; the stand-ins do not split fp8 weights.
    """
    if precision in _DELAYED:
        return parse_layout('pp4')
    return parse_layout('pp2-ep2') if layout.tp > 1 or layout.vp > 1 else layout


def allowed(feature: Feature, layout: Layout) -> bool:
    """True if upstream accepts a feature with a layout.

    A growing batch must be a whole number of micro-batches on every data-parallel rank, and with
    virtual stages also a whole number of rounds through the pipeline.
    """
    if feature is not Feature.RAMP_UP:
        return True
    micro_batches, rest = divmod(SAMPLES, layout.dp)
    return not rest and (layout.vp == 1 or micro_batches % layout.pp == 0)
