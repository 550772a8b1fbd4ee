# SPDX-License-Identifier: Apache-2.0
"""Claims of the text, figures 6, 10 and 11, appendix D and Lazarus, with computed numbers.

Also findings about the consistency of the tables. The texts and printed numbers are in
`paper.json`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from operator import itemgetter
from statistics import mean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...model.layout import PRECISIONS
from .. import placement as expert_placement
from ..experts import concentration, stale_checkpoints
from .tables import (
    CHECKFREQ,
    DENSE,
    DENSE_BYTES,
    ETTR_TOLERANCE,
    GEMINI,
    MOC,
    MOEVEMENT,
    PAPER,
    ROWS,
    T3,
    T7,
    TABLES,
    WEIGHT_BYTES,
    Condition,
    Fits,
    Setting,
    Verdict,
    judge,
    priced,
    slot_bytes,
)  # fmt: skip

COPY_BYTES_PER_S = 25e9
"""Rate to host memory of one A100 (PCIe 4, 25 of nominally 32 GB/s)."""


class Claim(msgspec.Struct, frozen=True):
    """A number of a figure or of the text."""

    source: str
    statement: str
    theirs: float | None
    """None: a finding about the paper's numbers that the paper does not print."""
    ours: float | None
    verdict: Verdict
    how: str


def claim(
    key: str, ours: float | None, theirs: float | None = None, holds: bool | None = None,
    **fields: object,
) -> Claim:  # fmt: skip
    """A claim of the file, judged by its tolerance unless `holds` is the result.

    Args:
        key: name of the claim.
        ours: the computed number; None if the paper does not give its inputs.
        theirs: the printed number, unless the claim itself has it.
        holds: whether the claim follows.
        fields: values for the texts.
    """
    row = PAPER.claims[key]
    theirs = row.theirs if theirs is None else theirs
    if holds is not None:
        verdict = Verdict.FOLLOWS if holds else Verdict.DIFFERS
    elif ours is None:
        verdict = Verdict.NO_INPUTS
    else:
        verdict = Verdict.FINDING if theirs is None else judge(ours, theirs, row.tolerance)
    source, statement, how = (one.format(**fields) for one in (row.source, row.statement, row.how))
    return Claim(source, statement, theirs, ours, verdict, how)


def all_claims(fits: Fits) -> list[Claim]:
    """Claims on captures, windows and tables in the order of the paper's sections; then figures."""
    return [
        *_captures(), *_windows(), *_moevement(), *_dense_recoveries(), *_trace(fits), *_scaling(),
        *_moc(), *_skew(), *_lazarus(),
    ]  # fmt: skip


def _captures() -> Iterator[Claim]:
    """Sizes of slots and windows, and the work that frozen operators save."""
    slots, saving = slot_bytes(3) / DENSE_BYTES, PAPER.text['frozen_saving']
    yield claim('frozen operator', 1 - WEIGHT_BYTES / DENSE_BYTES)
    yield claim('first slot', 1 - float(slots[0]))
    yield claim('mean slot', 1 - float(slots.mean()))
    for window in (3, 5, 6):
        stored = float(slot_bytes(window).sum())
        yield claim('whole window', stored / DENSE_BYTES, window=window)
    for window in (3, 5, 6):
        share = (window - 1) / (2 * window)
        yield claim('frozen saving', saving * share, saving, window=window)
    for setting in TABLES[T7].settings:
        precision = PRECISIONS[setting.name.lower()]
        exact, theirs = precision.full_bytes, setting.full_bytes
        texts: dict[str, Any] = {
            'name': setting.name,
            'wide': msgspec.structs.replace(precision, compute='bf16'),
        }
        key = 'full bytes' if precision.master == 'fp32' else 'full bytes, narrow master'
        yield claim(key, exact, theirs, **texts, precision=precision)
        yield claim('weight bytes', precision.weight_bytes, setting.weight_bytes, **texts)


class Implied(NamedTuple):
    """Bandwidth in bytes/s, for the bytes of the whole model, that implies the printed window."""

    table: str
    setting: Setting
    least: float
    below: float


def implied_bandwidths() -> list[Implied]:
    """One range per setting of Tables 3 and 7.

    Algorithm 1 with equal operators needs W = ceil((A - F) / (b - F)) slots for a budget of b bytes
    per parameter and iteration, of A bytes in full and F of weights. So a window implies a range of
    budgets, and with the parameters and the iteration time a range of bandwidths.
    """

    def rate(one: Setting, slots: int) -> float:
        budget = one.weight_bytes + (one.full_bytes - one.weight_bytes) / slots
        return budget * (one.params_e9 * 1e9 / one.iteration_s)

    return [
        Implied(name, one, rate(one, one.window), rate(one, one.window - 1))
        for name, table in TABLES.items()
        for one in table.settings
    ]


def best_bandwidth(ranges: Sequence[Implied]) -> tuple[float, int]:
    """The bandwidth that implies most of the windows (fitted), and their number."""
    met = {
        one.least: sum(other.least <= one.least < other.below for other in ranges) for one in ranges
    }
    return max(met.items(), key=itemgetter(1))


def window_as_printed(setting: Setting, bandwidth: float) -> int | None:
    """W of Algorithm 1 at a bandwidth for the whole model; None if every window is too short."""
    budget = bandwidth * setting.iteration_s / (setting.params_e9 * 1e9)
    if budget <= setting.weight_bytes:
        return None
    step = setting.full_bytes - setting.weight_bytes
    return max(1, math.ceil(step / (budget - setting.weight_bytes) - 1e-9))


def _windows() -> Iterator[Claim]:
    """The windows of Tables 3 and 7; and W = 1 if each GPU copies its part over its own link."""
    ranges = implied_bandwidths()
    rate, _ = best_bandwidth(ranges)
    for one in ranges:
        window, theirs = window_as_printed(one.setting, rate), one.setting.window
        gigabytes = [value / 1e9 for value in (rate, one.least, one.below)]
        yield claim('window', window, theirs, window == theirs, one=one, gb=gigabytes)
    yield claim('share of a dense capture', max(
        one.full_bytes * one.params_e9 * 1e9 / table.gpus / COPY_BYTES_PER_S / one.iteration_s
        for table in TABLES.values() for one in table.settings
    ))  # fmt: skip


def _rows(name: str, system: str) -> Iterator[list[Condition]]:
    return (found for row, found in ROWS.items() if (row[0], row[2]) == (name, system))


def _moevement() -> Iterator[Claim]:
    """Consistency of MoEvement's own columns."""
    known = [
        (one, one.recovery_s / one.failures, one.ettr)
        for row in _rows(T3, MOEVEMENT)
        for one in row
        if one.recovery_s is not None and one.ettr is not None
    ]
    reported = [seconds / priced(one).expected_recovery_s() for one, seconds, _ in known]
    needed = [
        one.mtbf_s * (1 / (ettr * (1 + one.overhead_s / one.setting.iteration_s)) - 1) / seconds
        for one, seconds, ettr in known
        if one.mtbf == '10M'
    ]
    for key, ratios in (('reported recovery', reported), ('needed recovery', needed)):
        yield claim(key, min(ratios), end='least')
        yield claim(key, max(ratios), end='greatest')
    constant, met, cells = best_constant_ettr()
    yield claim('one number', float(met), constant=constant, cells=cells)


def best_constant_ettr() -> tuple[float, int, int]:
    """The constant ETTR that meets most MoEvement cells, the cells that it meets, and all cells."""
    ettr = np.array([one.ettr for row in ROWS.values() for one in row if one.system == MOEVEMENT])
    candidates = np.unique(ettr) + ETTR_TOLERANCE
    met = (np.abs(candidates[:, None] - ettr) <= ETTR_TOLERANCE + 1e-9).sum(axis=1)
    best = int(met.argmax())
    return float(candidates[best]), int(met[best]), len(ettr)


def _dense_recoveries() -> Iterator[Claim]:
    """A hidden rule of the recovery columns of Table 3."""
    for gemini, checkfreq in zip(_rows(T3, GEMINI), _rows(T3, CHECKFREQ), strict=True):
        setting = gemini[0].setting
        seconds = [
            2 * one.recovery_s / one.failures / one.interval
            for one in gemini
            if one.recovery_s is not None
        ]
        ours = float(np.median(seconds))
        yield claim('iteration time', ours, setting.iteration_s, name=setting.name)
        seconds_at = {one.mtbf: one.recovery_s or math.nan for one in checkfreq}
        failures = {one.mtbf: one.failures for one in checkfreq}
        hourly_s = seconds_at['1H'] / failures['1H']
        yield claim('failures', seconds_at['10M'] / hourly_s, failures['10M'], name=setting.name)


def _trace(fits: Fits) -> Iterator[Claim]:
    """Section 5.3: DeepSeek-MoE over six hours of failures."""
    trace = PAPER.text['trace']
    minutes = trace['hours'] * 60 / trace['failures']
    yield claim('minutes between failures', minutes, trace['mtbf_min'])
    for system in DENSE:
        row = T3, 'DeepSeek-MoE', system
        assert ROWS[row][0].interval == trace['interval'][system]
        for mtbf, constants in product((minutes, trace['mtbf_min']), (None, fits[row])):
            ours, other = (
                priced(ROWS[T3, 'DeepSeek-MoE', name][0]._replace(mtbf_s=60 * mtbf), constants)
                for name in (MOEVEMENT, system)
            )
            ratio = ours.ettr_first_order() / other.ettr_first_order()
            key = 'goodput, fitted' if constants else 'goodput'
            yield claim(key, ratio, trace['goodput'][system], system=system, minutes=mtbf)
    yield claim('goodput over MoC', None)
    moc = ROWS[T3, 'DeepSeek-MoE', MOC][0]
    few, every = trace['moc_expert_share']
    slow = 1 + moc.overhead_s * every / few / moc.setting.iteration_s
    yield claim("loss of MoC's goodput", 1 - (1 + moc.overhead_s / moc.setting.iteration_s) / slow)


def _scaling() -> Iterator[Claim]:
    """Figure 11; iteration times, windows and overheads of its models are not given."""
    scaling = PAPER.text['scaling']
    theirs, clusters, least = (scaling[name] for name in ('largest_10m', 'clusters', 'largest_1h'))
    for one in clusters:
        gpus = one['data_parallel'] * one['pipeline'] * scaling['expert_parallel']
        yield claim('GPUs', gpus, one['gpus'], **one)
    for system in (MOEVEMENT, GEMINI):
        ours = priced(ROWS[T3, 'DeepSeek-MoE', system][-1]).ettr_first_order()
        yield claim('largest at 10M', ours, theirs[system], system=system)
    yield claim('largest, speedup', theirs[MOEVEMENT] / theirs[GEMINI])
    recovery_s = 600 * (1 / theirs[MOEVEMENT] - 1)
    rare = 1 / (1 + recovery_s / 3600)
    yield claim('largest at 1H', rare, least, rare >= least, seconds=recovery_s)
    yield claim('GPU hours per failure', clusters[-1]['gpus'] / 6)


def _moc() -> Iterator[Claim]:
    """MoC-System's rule for K, and the ranges of its ETTR in the text."""
    rule = PAPER.text['moc']
    doublings = math.log2(rule['experts'] / rule['experts_saved'])
    for name in ('QWen-MoE', 'DeepSeek-MoE'):
        share = lost_token_share(ROWS[T3, name, MOC][0], rule, 600)
        count = 0 if share <= rule['lost_token_limit'] else 1
        yield claim('doublings of K', count, doublings, count > 0, name=name, percent=100 * share)
    conditions = [one for row in _rows(T7, MOC) for one in row]
    for mtbf, (least, greatest) in rule['table7_ettr_range'].items():
        ours = [priced(one).ettr_first_order() for one in conditions if one.mtbf == mtbf]
        yield claim('ETTR of MoC', min(ours), least, mtbf=mtbf, end='least')
        yield claim('ETTR of MoC', max(ours), greatest, mtbf=mtbf, end='greatest')


def lost_token_share(condition: Condition, rule: Mapping[str, Any], mtbf_s: float) -> float:
    """Share of the tokens of a run whose updates are lost if K never doubles.

    If K of N experts are saved in turn, the state of an expert is (N/K - 1)/2 iterations old on
    average when a failure strikes.
    """
    step_s = condition.setting.iteration_s + condition.overhead_s
    alike = np.full(rule['experts'], 1 / rule['experts'])
    return stale_checkpoints(alike, rule['experts_saved'], 'sequential') * step_s / mtbf_s


def _skew() -> Iterator[Claim]:
    """Appendix D: S = 1/(1 + alpha E) for a symmetric Dirichlet over E experts."""
    skew = PAPER.text['skew']
    for value, theirs in skew['alpha'].items():
        ours = concentration(float(value), skew['experts'])
        yield claim('alpha', ours, theirs, abs(ours - theirs) <= 0.005 * theirs, skew=value)
    uniform = ROWS[T3, 'DeepSeek-MoE', MOC][-1]
    yield claim('ETTR of MoC without skew', priced(uniform).ettr_first_order())


def _lazarus() -> Iterator[Claim]:
    """Survival of all experts of a layer in Lazarus (arXiv 2407.04656), whose loads are not given.

    The load with the worst overlap has nearly all tokens on one expert: three groups of two nodes
    each.
    """
    given = PAPER.text['lazarus']
    shape = (given['nodes'], given['slots'])
    replicas = [given['least_replicas']] * (given['experts'] - 1)
    replicas.append(given['nodes'] * given['slots'] - sum(replicas))
    overlap = expert_placement.maximum_rank_overlap(replicas, *shape)
    spreads = [expert_placement.spread(replicas, *shape, seed) for seed in range(20)]
    together, *spread = (
        expert_placement.recovery_probability(placement, given['failed_nodes'])
        for placement in (overlap, *spreads)
    )
    for placed, ours in (
        ('with maximum rank overlap', together),
        ('with replicas spread out', mean(spread)),
    ):
        theirs = given['survival'][placed]
        yield claim('survival', ours, theirs, theirs >= ours, placed=placed)
