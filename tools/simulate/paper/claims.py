# SPDX-License-Identifier: Apache-2.0
"""Claims of the text, figures 6, 10 and 11, appendix D and Lazarus, with computed numbers.

Also findings about the consistency of the tables.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from itertools import product
from statistics import mean

import msgspec
import numpy as np

from tools.plan.layout import PRECISIONS, Precision
from tools.simulate import placement as expert_placement
from tools.simulate.experts import concentration, stale_checkpoints
from tools.simulate.paper import memory, tables
from tools.simulate.paper.cells import ETTR_TOLERANCE, Fits, Verdict, judge, priced

RATIO_TOLERANCE = 0.05
_T3, _T7, _BOTH = 'Table 3', 'Table 7', 'Tables 3, 7'


class Claim(msgspec.Struct, frozen=True):
    """A number of a figure or of the text."""

    source: str
    statement: str
    theirs: float | None
    """None: a finding about the paper's numbers that the paper does not print."""
    ours: float | None
    verdict: Verdict
    how: str
    """Inputs of the computed number; mentions any fitted constant."""

    @property
    def difference(self) -> float | None:
        return None if self.ours is None or self.theirs is None else self.ours - self.theirs


def judged(
    source: str, statement: str, theirs: float, ours: float, tolerance: float, how: str
) -> Claim:
    """A claim that the computed number confirms or contradicts."""
    return Claim(source, statement, theirs, ours, judge(ours, theirs, tolerance), how)


def found(source: str, statement: str, ours: float, how: str) -> Claim:
    """A finding without a printed number in the paper."""
    return Claim(source, statement, None, float(ours), Verdict.FINDING, how)


def follows_if(holds: bool) -> Verdict:
    return Verdict.FOLLOWS if holds else Verdict.DIFFERS


def all_claims(fits: Fits) -> list[Claim]:
    """Claims on captures, windows and tables in the order of the paper's sections; then figures."""
    return [
        *capture_claims(), *precision_claims(), *window_claims(), *moevement_claims(),
        *dense_recovery_claims(), *trace_claims(fits), *scaling_claims(), *moc_claims(),
        *skew_claims(), *lazarus_claims(),
    ]  # fmt: skip


def capture_claims() -> Iterator[Claim]:
    """Sizes of slots and windows, and the work that frozen operators save."""
    printed, dense = tables.prose(), memory.DENSE_BYTES
    slots = memory.slot_bytes(3, dense, memory.WEIGHT_BYTES) / dense
    yield judged('fig. 6', 'a frozen operator is smaller by', printed['frozen_operator_reduction'],
                 1 - memory.WEIGHT_BYTES / dense, 0.005, '2 of 12 bytes per parameter')  # fmt: skip
    yield judged('fig. 6', 'slots are smaller than a dense capture by (W = 3)',
                 printed['first_slot_reduction'], 1 - float(slots[0]), 0.01,
                 'the first slot; it is the largest one')  # fmt: skip
    yield found('fig. 6', 'mean over the slots of W = 3', 1 - float(slots.mean()), 'as above')
    for window in (3, 5, 6):
        stored = float(memory.slot_bytes(window, dense, memory.WEIGHT_BYTES).sum())
        yield found('sec. 3.2', f'a window of {window} over a dense capture, in bytes',
                    stored / dense, '(12 + (W-1)) / 12')  # fmt: skip
    saving = printed['frozen_saving']
    for window in (3, 5, 6):
        frozen_share = (window - 1) / (2 * window)
        yield judged('sec. 3.2', f'frozen operators save of a conversion, W = {window}', saving,
                     saving * frozen_share, 0.015,
                     'the 33 % hold per operator; on average (W-1)/2W are frozen')  # fmt: skip


def precision_claims() -> Iterator[Claim]:
    """Bytes per parameter in Table 7, and those that an exact recovery needs."""
    for setting in tables.ettr_tables()[_T7].settings:
        precision = PRECISIONS[setting.name.lower()]
        wider = dataclasses.replace(precision, compute='bf16')
        yield judged(_T7, f'bytes of a full capture, {setting.name}', setting.full_bytes,
                     precision.full_bytes, 0.0, f'exact: {_why_beside(precision)}; '
                     f'{wider.full_bytes} with weights of 16 bits')  # fmt: skip
        yield judged(_T7, f'bytes of a capture of compute weights, {setting.name}',
        setting.weight_bytes,
                     precision.weight_bytes, 0.0, f'exact: the weight; {wider.weight_bytes} with '
                     'weights of 16 bits; with delayed scaling every slot has the state of all '
                     'scales besides')  # fmt: skip


def _why_beside(precision: Precision) -> str:
    """Reason why the paper's master and moments alone do not determine the weight."""
    if precision.master == 'fp32':
        return 'the fp8 weight beside the master: its scale is agreed on by all ranks'
    return (
        f'the {precision.compute} weight beside the {precision.master} master: both are rounded '
        'from the fp32 value of the update'
    )


def window_claims() -> Iterator[Claim]:
    """The windows of Tables 3 and 7, and bandwidths."""
    ranges = memory.implied_bandwidths()
    rate, _ = memory.best_bandwidth(ranges)
    for one in ranges:
        window, theirs = memory.window_as_printed(one.setting, rate), one.setting.window
        yield Claim(one.table, f'W of {one.setting.name}', theirs, window,
                    follows_if(window == theirs), 'Algorithm 1, whole model over one link of '
                    f'{rate / 1e9:.1f} GB/s (fitted, one for all); it takes {one.least / 1e9:.1f} '
                    f'to {one.below / 1e9:.1f}')  # fmt: skip
    shares = [
        memory.dense_capture_share(table, setting)
        for table in tables.ettr_tables().values()
        for setting in table.settings
    ]
    yield found(_BOTH, 'largest share of an iteration that W = 1 needs', max(shares),
                'state sharded evenly, each GPU copies at 25 GB/s; W = 1 fits below 1')  # fmt: skip


def moevement_claims() -> Iterator[Claim]:
    """Consistency of MoEvement's own columns."""
    rows = tables.rows([_T3], [tables.MOEVEMENT])
    known = [one for row in rows for one in row if one.recovery_s is not None]
    reported = np.array([one.recovery_s / one.failures for one in known])  # type: ignore[operator]
    expected = np.array([priced(one).expected_recovery_s() for one in known])
    often = np.array([one.mtbf == '10M' for one in known])
    needed = np.array([_implied_recovery_s(one) for one in known])
    for statement, ratios, how in (
        ('reported recovery of MoEvement over 3/2 W T', reported / expected,
         'below 2/3: less than the W iterations that a conversion replays'),
        ('recovery its ETTR needs over the reported one, 10M', (needed / reported)[often],
         'E[R] = M (1/(ETTR (1 + o/T)) - 1)'),
    ):  # fmt: skip
        yield found(_T3, f'{statement}, least', ratios.min(), how)
        yield found(_T3, f'{statement}, greatest', ratios.max(), how)
    constant, met, cells = best_constant_ettr()
    yield found(_BOTH, f'MoEvement cells that the one number {constant:.3f} meets', met,
                f'of {cells}, within 1.5 points; such cells test no formula')  # fmt: skip


def best_constant_ettr() -> tuple[float, int, int]:
    """The constant ETTR that meets most MoEvement cells, the cells that it meets, and all cells."""
    rows = tables.rows(systems=[tables.MOEVEMENT])
    ettr = np.array([condition.ettr for row in rows for condition in row])
    candidates = np.unique(ettr) + ETTR_TOLERANCE
    met = (np.abs(candidates[:, None] - ettr) <= ETTR_TOLERANCE + 1e-9).sum(axis=1)
    best = int(met.argmax())
    return float(candidates[best]), int(met[best]), len(ettr)


def _implied_recovery_s(condition: tables.Condition) -> float:
    assert condition.ettr is not None
    step = 1 + condition.overhead_s / condition.setting.iteration_s
    return condition.mtbf_s * (1 / (condition.ettr * step) - 1)


def dense_recovery_claims() -> Iterator[Claim]:
    """A hidden rule of the recovery columns of Table 3."""
    columns, run_s = tables.ettr_tables()[_T3].mtbf_s, tables.ettr_tables()[_T3].run_s
    for row in tables.rows([_T3], [tables.GEMINI]):
        setting = row[0].setting
        seconds = [
            2 * one.recovery_s / one.failures / one.interval
            for one in row
            if one.recovery_s is not None
        ]
        yield judged(
            _T3, f"iteration time in Gemini's recoveries, {setting.name}", setting.iteration_s,
            float(np.median(seconds)), 0.05,
            'median of 2 x seconds / (failures x interval); theirs is that of the overheads',
        )  # fmt: skip
        printed = dict(zip(columns, setting.systems[tables.CHECKFREQ].recovery_s, strict=True))
        hourly, often = printed['1H'], printed['10M']
        assert hourly is not None and often is not None
        yield judged(
            _T3, f"failures in CheckFreq's 10M column, {setting.name}", run_s / columns['10M'],
            often / (hourly * columns['1H'] / run_s), 1.0,
            'its seconds over those of a failure in the 1H column; theirs is 12 h / 10 min',
        )  # fmt: skip


def trace_claims(fits: Fits) -> Iterator[Claim]:
    """Section 5.3: DeepSeek-MoE over six hours of failures."""
    printed = tables.prose()['trace']
    mtbf_s, told = printed['hours'] * 3600 / printed['failures'], printed['mtbf_min']
    yield judged('sec. 5.3', 'mean minutes between failures', told, mtbf_s / 60, 0.5, '6 h / 24')
    table = tables.ettr_tables()[_T3]
    setting = table.setting('DeepSeek-MoE')
    rows = {system: tables.conditions(table, setting, system)[0] for system in setting.systems}
    for system in tables.DENSE:
        assert rows[system].interval == printed['interval'][system]
        fitted = fits[rows[system].row]
        for minutes, constants in product((mtbf_s / 60, told), (None, fitted)):
            ours, other = (
                priced(rows[name]._replace(mtbf_s=60 * minutes), constants).ettr_first_order()
                for name in (tables.MOEVEMENT, system)
            )
            how = 'constants fitted to Table 3' if constants else 'nothing fitted'
            fitted_too = ', fitted' if constants else ''
            yield judged(
                'fig. 10',
                f'goodput of MoEvement over {system}, MTBF {minutes:.0f} min{fitted_too}',
                printed['goodput_ratio'][system], ours / other, RATIO_TOLERANCE,
                f'first order, inputs of Table 3 (2H), {how}',
            )  # fmt: skip
    yield Claim('fig. 10', 'goodput of MoEvement over MoC', printed['goodput_ratio']['MoC'], None,
                Verdict.NO_INPUTS, 'when K doubled is not given')  # fmt: skip
    moc = rows[tables.MOC]
    few, every = printed['moc_expert_share']
    slow = 1 + moc.overhead_s * every / few / setting.iteration_s
    drop = 1 - (1 + moc.overhead_s / setting.iteration_s) / slow
    yield judged('fig. 10', "loss of MoC's goodput as K goes from 8 to 64",
                 printed['moc_goodput_drop'], drop, RATIO_TOLERANCE,
                 'overhead of Table 3 (2H), in proportion to K')  # fmt: skip


def scaling_claims() -> Iterator[Claim]:
    """Figure 11; iteration times, windows and overheads of its models are not given."""
    printed, source = tables.prose()['scaling'], 'fig. 11'
    for cluster in printed['clusters']:
        gpus = cluster['data_parallel'] * cluster['pipeline'] * printed['expert_parallel']
        yield judged(source, f"GPUs of {cluster['model']}", cluster['gpus'], gpus, 0,
                     'data x pipeline x expert parallel')  # fmt: skip
    table, theirs = tables.ettr_tables()[_T3], printed['largest_10m']
    for system in (tables.MOEVEMENT, tables.GEMINI):
        condition = tables.conditions(table, table.setting('DeepSeek-MoE'), system)[-1]
        yield judged(
            source, f'ETTR of {system}, 671B, 10M', theirs[system],
            priced(condition).ettr_first_order(), ETTR_TOLERANCE,
            'first order, if DeepSeek-MoE of Table 3 scaled perfectly',
        )  # fmt: skip
    yield judged(source, 'MoEvement over Gemini, 671B, 10M', printed['speedup'],
                 theirs['MoEvement'] / theirs['Gemini'], 0.02, 'from their own ETTRs')  # fmt: skip
    recovery_s = 600 * (1 / theirs['MoEvement'] - 1)
    least, rare = printed['moevement_1h_least'], 1 / (1 + recovery_s / 3600)
    yield Claim(
        source, 'ETTR of MoEvement, 1H, at least', least, rare, follows_if(rare >= least),
        f'671B, with the {recovery_s:.0f} s of recovery (fitted) that its ETTR at 10M needs '
        f'without any overhead',
    )  # fmt: skip
    yield found(source, 'GPU hours per failure at 10M, 671B', printed['clusters'][-1]['gpus'] / 6,
                'Llama 3 had about 50 thousand, OPT-175B 7.5 thousand')  # fmt: skip


def moc_claims() -> Iterator[Claim]:
    """MoC-System's rule for K, and the ranges of its ETTR in the text."""
    rule, table = tables.prose()['moc'], tables.ettr_tables()[_T3]
    doublings = math.log2(rule['experts'] / rule['experts_saved'])
    for name in ('QWen-MoE', 'DeepSeek-MoE'):
        first = tables.conditions(table, table.setting(name), tables.MOC)[0]
        share = lost_token_share(first, rule, table.mtbf_s['10M'])
        count = 0 if share <= rule['lost_token_limit'] else 1
        yield Claim(
            _T3, f'doublings of K in 12 h at 10M, {name}', doublings, count,
            follows_if(count > 0),
            f'{100 * share:.1f} % of the tokens are lost, 3.75 % are allowed (8 of 64 experts '
            f'saved per iteration); in fig. 10 K reaches all of them',
        )  # fmt: skip
    ettr = [(one.mtbf, priced(one).ettr_first_order())
            for row in tables.rows([_T7], [tables.MOC]) for one in row]  # fmt: skip
    for mtbf, (least, greatest) in rule['table7_ettr_range'].items():
        ours = [value for column, value in ettr if column == mtbf]
        for name, theirs, end in (('least', least, min), ('greatest', greatest, max)):
            yield judged(_T7, f'ETTR of MoC, {mtbf}, {name}', theirs, end(ours), ETTR_TOLERANCE,
                         'first order')  # fmt: skip


def lost_token_share(
    condition: tables.Condition, rule: Mapping[str, float], mtbf_s: float
) -> float:
    """Share of the tokens of a run whose updates are lost if K never doubles.

    If K of N experts are saved in turn, the state of an expert is (N/K - 1)/2 iterations old on
    average when a failure strikes.
    """
    step_s = condition.setting.iteration_s + condition.overhead_s
    experts = int(rule['experts'])
    alike = np.full(experts, 1 / experts)
    return stale_checkpoints(alike, int(rule['experts_saved']), 'sequential') * step_s / mtbf_s


def skew_claims() -> Iterator[Claim]:
    """Appendix D: S = 1/(1 + alpha E) for a symmetric Dirichlet over E experts."""
    printed = tables.prose()['skew']
    for skew, theirs in printed['alpha'].items():
        ours = concentration(float(skew), printed['experts'])
        yield judged(
            'app. D', f'alpha for S = {skew}', theirs, ours, 0.005 * theirs, '(1/S - 1) / E'
        )
    table = tables.ettr_tables()[_T3]
    uniform = tables.conditions(table, table.setting('DeepSeek-MoE'), tables.MOC)[-1]
    yield judged('app. D', 'ETTR of MoC without skew, 10M', printed['moc_ettr_uniform'],
                 priced(uniform).ettr_first_order(), ETTR_TOLERANCE,
                 'first order, overhead of Table 3 (whose own ETTR is 0.134)')  # fmt: skip


def lazarus_claims() -> Iterator[Claim]:
    """Survival of all experts of a layer in Lazarus (arXiv 2407.04656), whose loads are not given.

    The load with the worst overlap has nearly all tokens on one expert: three groups of two nodes
    each.
    """
    printed = tables.prose()['lazarus']
    shape = (printed['nodes'], printed['slots'])
    replicas = [printed['least_replicas']] * (printed['experts'] - 1)
    replicas.append(printed['nodes'] * printed['slots'] - sum(replicas))
    overlap = expert_placement.maximum_rank_overlap(replicas, *shape)
    spreads = [expert_placement.spread(replicas, *shape, seed) for seed in range(20)]
    survival = [
        expert_placement.recovery_probability(placement, printed['failed_nodes'])
        for placement in (overlap, *spreads)
    ]
    for name, placed, least in (
        ('maximum_rank_overlap', 'with maximum rank overlap', survival[0]),
        ('spread', 'with replicas spread out', mean(survival[1:])),
    ):
        yield Claim(
            'Lazarus', f'survival of 4 failures {placed}', printed[name], least,
            follows_if(printed[name] >= least),
            'one layer with the most skewed load, which gives the least; more follows from others',
        )  # fmt: skip
