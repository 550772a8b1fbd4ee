# SPDX-License-Identifier: Apache-2.0
r"""Computes the time of a pipeline's iteration from measurements of one node (paper, appendix C).

    moevement simulate iteration --profile train.log
    moevement simulate iteration --profile stages.json --layers 6,7,7,6 --micro-batches 32

M micro-batches through S stages take (M + S - 1) max_s t_s; then gradients are synchronised and the
optimizer steps. `--profile` is the whole output of a Megatron run (both streams) with
`--timing-log-level 2 --timing-log-option all --logging-level 20 --log-interval 1`, or a JSON object
with the fields of StageProfile. With other `--layers` than measured, a layer takes as long as on
the stage with the fastest layers; the first and the last stage keep their additional time
(embedding, head).

The times of a stage divided by their median are the slowdowns of stragglers; an iteration waits for
the slowest stage, each drawn independently. Collectives take latency + bytes / rate, fitted to
their measurements by least squares.

Exit status: 0 done, 2 a flag or file breaks a rule.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from ..lab.arguments import Parser
from ..model.command import add_flags_of, show
from ..model.description import DescriptionError, read
from ..model.fields import Count, FieldError, NotNegative, Whole, parser_of, require
from ..model.layout import spread
from . import scenario

_COMPUTE, _SYNC, _UPDATE = ('forward-compute', 'backward-compute'), 'all-grads-sync', 'optimizer'
_REPORT = re.compile(r'times across ranks \(ms\):\n((?:  [\w-]+:\n(?: +rank +\d+: [\d.]+\n)+)+)')
_TIMER = re.compile(r'^  ([\w-]+):\n((?: +rank .*\n)+)', re.M)
_ARGUMENT = re.compile(r'^  (\w+) \.+ (.+)$', re.M)
_SIZES = ('num_layers', 'pipeline_model_parallel_size', 'global_batch_size', 'micro_batch_size',
          'data_parallel_size')  # fmt: skip
_UNEVEN = ('decoder_first_pipeline_num_layers', 'decoder_last_pipeline_num_layers',
           'pipeline_model_parallel_layout')  # fmt: skip
# Iterations of a log to skip, if there are more: they allocate and compile.
_WARM_UP = 2


class Collective(msgspec.Struct, frozen=True):
    """One kind of collective: bytes and seconds as measured, and its calls in an iteration."""

    measured: tuple[tuple[float, float], ...]
    calls: tuple[float, ...] = ()
    """Bytes of each call of an iteration that is not overlapped."""

    def fit(self, name: str) -> dict[str, float]:
        """Latency and rate (least squares).

        A latency below 0 is unmeasurable: then it is 0, and the rate is that of a line through the
        origin. Raises FieldError: there are fewer than two sizes, or more bytes take no longer.
        """
        nbytes, seconds = np.array(self.measured, dtype=float).reshape(-1, 2).T
        field, rule = f'collectives.{name}', 'give bytes and seconds of calls of two sizes or more'
        require(len(np.unique(nbytes)) > 1, field, self.measured, rule)
        columns = np.stack([np.ones_like(nbytes), nbytes], axis=1)
        (latency_s, per_byte), *_ = np.linalg.lstsq(columns, seconds)
        if latency_s < 0:
            latency_s, per_byte = 0.0, float(nbytes @ seconds / (nbytes @ nbytes))
        rule = 'more bytes take no longer; measure larger ones'
        require(per_byte > 0, field, self.measured, rule)
        return {'latency_s': float(latency_s), 'bytes_per_s': float(1 / per_byte)}


class StageProfile(msgspec.Struct, frozen=True):
    """Measurements of one node."""

    format: Literal['moevement-stages/1']
    micro_batch_s: tuple[tuple[float, ...], ...]
    """Seconds of forward and backward of one micro-batch, by stage and iteration."""
    micro_batches: Whole
    layers: tuple[Count, ...] | None = None
    """Layers on each stage; None: unknown, so that no other layers can be computed."""
    chunks: Whole = 1
    """Model chunks per stage (virtual stages), which shorten the bubble."""
    sync_s: NotNegative = 0.0
    """Seconds of gradient synchronisation per iteration, in addition to `collectives`."""
    update_s: NotNegative = 0.0
    collectives: dict[str, Collective] = {}

    def __post_init__(self) -> None:
        good = bool(self.micro_batch_s) and all(self.micro_batch_s)
        good = good and all(0 < one < np.inf for stage in self.micro_batch_s for one in stage)
        rule = 'give seconds above 0, one or more of each stage'
        require(good, 'micro_batch_s', self.micro_batch_s, rule)
        stages = len(self.micro_batch_s)
        good = self.layers is None or len(self.layers) == stages
        require(good, 'layers', self.layers, f'give those of each of {stages} stages')

    def stage_s(self, layers: Sequence[int] | None = None) -> np.ndarray:
        """Median seconds of a micro-batch, as measured or with other layers; float64 [stages].

        Raises FieldError: the profile has no layers, or all of its layers are at the ends.
        """
        measured = np.array([np.median(stage) for stage in self.micro_batch_s])
        if layers is None or tuple(layers) == self.layers:
            return measured
        if self.layers is None or not any(self.layers):
            raise FieldError('layers', 'are not known of the measured stages')
        counts = np.array(self.layers)
        layer_s = float((measured[counts > 0] / counts[counts > 0]).min())
        found = layer_s * np.array(layers, dtype=float)
        found[0] += measured[0] - layer_s * counts[0]
        if len(measured) > 1:
            found[-1] += measured[-1] - layer_s * counts[-1]
        return found

    def slowdowns(self) -> np.ndarray:
        """Times divided by the median of their stage, over all stages, ascending."""
        stages = (np.array(stage) / np.median(stage) for stage in self.micro_batch_s)
        return np.sort(np.concatenate([*stages]))


def slowest_s(stage_s: np.ndarray, slowdowns: np.ndarray) -> float:
    """Mean of max_s t_s X_s, where the X_s are drawn independently from `slowdowns`.

    Exact: the distribution function of the maximum is the product of the stages' functions.
    """
    values = np.unique(np.outer(stage_s, slowdowns))
    # t X and t x are the same product, so rounding cannot separate a value from its own step.
    below = [np.searchsorted(np.sort(one * slowdowns), values, side='right') for one in stage_s]
    reached = np.prod(np.array(below) / len(slowdowns), axis=0)
    return float(values @ np.diff(reached, prepend=0.0))


def iteration_of(
    profile: StageProfile, layers: Sequence[int] | None = None, micro_batches: int | None = None
) -> dict[str, object]:
    """Parts of an iteration's time with these layers; None: as measured.

    `bubble` is the share of the pipeline's time in which a stage waits, (S - 1) / (M + S - 1); with
    chunks S - 1 is divided by their number, also in `pipeline_s`. `stragglers_s` are mean seconds
    that stragglers add. Raises FieldError: the profile has no layers.
    """
    batches = profile.micro_batches if micro_batches is None else micro_batches
    stage_s, slow = profile.stage_s(layers), profile.slowdowns()
    bubble = (len(stage_s) - 1) / profile.chunks
    pipeline_s = (batches + bubble) * float(stage_s.max())
    fits = {name: one.fit(name) for name, one in profile.collectives.items()}
    sync_s = profile.sync_s + sum(
        fits[name]['latency_s'] + nbytes / fits[name]['bytes_per_s']
        for name, one in profile.collectives.items()
        for nbytes in one.calls
    )
    p50, p95, greatest = np.quantile(slow, (0.5, 0.95, 1.0)).tolist()
    return {
        'stage_s': tuple(stage_s.tolist()),
        'micro_batches': batches,
        'bubble': bubble / (batches + bubble),
        'pipeline_s': pipeline_s,
        'sync_s': sync_s,
        'update_s': profile.update_s,
        'iteration_s': pipeline_s + (sync_s + profile.update_s),
        'stragglers_s': (batches + bubble) * slowest_s(stage_s, slow) - pipeline_s,
        'slowdown_p50': p50,
        'slowdown_p95': p95,
        'slowdown_greatest': greatest,
        'collectives': fits,
    }


# ---- files


def read_stages(path: Path) -> StageProfile:
    """Read a profile, or the log of a Megatron run.

    Raises DescriptionError: the file is neither; FieldError: a field breaks its rule.
    """
    try:
        log = path.read_text('utf-8', 'replace')
    except OSError as error:
        raise DescriptionError(f'{path}: cannot be read: {error.strerror}') from error
    if log.lstrip()[:1] == '{':
        return read(path, StageProfile)
    log = re.sub(r'^\[\w+\]:', '', log, flags=re.M)
    given, timers = dict(_ARGUMENT.findall(log)), _timers(log)
    if not timers or not all(given.get(name, '').isdecimal() for name in _SIZES):
        raise DescriptionError(
            f'{path}: neither JSON nor the whole log of a run with --timing-log-level 2 '
            '--timing-log-option all --logging-level 20 --log-interval 1'
        )
    layers, stages, batch, at_once, data = (int(given[name]) for name in _SIZES)
    micro_batches, kept = batch // (at_once * data), timers[_WARM_UP:] or timers
    of_ranks = np.array([np.sum([one[name] for name in _COMPUTE], axis=0) for one in kept])
    if of_ranks.shape[1] % stages:
        text = f'times of {of_ranks.shape[1]} ranks, which are not those of {stages} stages'
        raise DescriptionError(f'{path}: {text}')
    of_stages = of_ranks.reshape(len(kept), stages, -1).max(axis=2) / micro_batches
    sync_s, update_s = (
        float(np.median([max(one.get(name, [0.0])) for one in kept])) for name in (_SYNC, _UPDATE)
    )
    even = all(given.get(name, 'None') == 'None' for name in _UNEVEN)
    chunks = given.get('virtual_pipeline_model_parallel_size', 'None')
    return StageProfile(
        'moevement-stages/1', tuple(map(tuple, of_stages.T.tolist())), micro_batches,
        spread(layers, stages) if even else None, 1 if chunks == 'None' else int(chunks),
        sync_s, update_s,
    )  # fmt: skip


def _timers(log: str) -> list[dict[str, list[float]]]:
    """Seconds by timer and rank, of complete iterations with all ranks, not of checkpoints."""
    found = [
        {
            name: [float(line.rpartition(':')[2]) / 1000 for line in ranks.splitlines()]
            for name, ranks in _TIMER.findall(report)
        }
        for report in _REPORT.findall(log)
    ]
    counts = [min(len(one.get(name, ())) for name in _COMPUTE) for one in found]
    return [one for one, count in zip(found, counts, strict=True) if count == max(counts) > 0]


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='moevement simulate iteration', description=__doc__)
    assert __package__
    add_flags_of(parser, __package__, 'iteration.toml', {'layers': _layers})
    args = parser.parse_args(argv)
    with scenario.errors(parser):
        found = iteration_of(read_stages(args.profile), args.layers, args.micro_batches)
    show(found, as_json=args.json)
    return 0


def _layers(text: str) -> tuple[int, ...]:
    return tuple(parser_of(Count)(count) for count in text.split(','))


if __name__ == '__main__':
    sys.exit(main())
