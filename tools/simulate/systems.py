# SPDX-License-Identifier: Apache-2.0
"""The compared systems, and their costs for a profile.

Every system is a Dense or Sparse of `closed_form`, by itself or inside a Run. Given options are
used; other costs come from the profile by one rule per system, without constants: the table in
docs/simulator.md. The restart is that of the profile, plus loading, plus the lag: a dense
checkpoint counts once it is complete, so a failure also loses, on average, as many iterations as a
copy takes.
"""

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from moevement_ext.plan.byte_planner import OperatorTable, balanced, fewest_slots
from moevement_ext.plan.strategy.dense import young_s

from ..model import fields
from ..model.algorithm1 import plan_as_printed
from ..model.fields import (
    Checked,
    FieldError,
    NotNegative,
    Positive,
    PositiveOrInfinite,
    Share,
    Whole,
)
from . import closed_form as intervals
from .closed_form import Dense, Sparse, Window
from .experts import (
    PartialExperts,
    PartialRun,
    Selection,
    frozen_shares,
    spread_over,
    with_experts,
)
from .profile import Profile
from .runs import CopyRun, Pipeline, RunFactory, SparseRun

DENSE_SYSTEMS = ('none', 'dense', 'checkfreq', 'gemini', 'moc', 'moetion')
SPARSE_SYSTEMS = ('moevement', 'ours', 'copy')
PARTIAL_SYSTEMS = ('moc', 'moetion')
"""Systems that lose tokens, which are counted relative to the length of a job."""
SYSTEMS = DENSE_SYSTEMS + SPARSE_SYSTEMS
IntervalRule = Literal['oracle', 'young', 'daly']


class Options(Checked, frozen=True):
    """Known values of a system; None: computed from the profile."""

    iteration_s: Positive | None = None
    interval: Whole | None = None
    window: Window | None = None
    overhead_s: NotNegative | None = None
    stall_s: NotNegative | None = None
    restart_s: NotNegative | None = None
    mtbf_s: PositiveOrInfinite = math.inf
    local_saving: Share = 0.0
    frozen_saving: Share = 0.0
    pipeline: Pipeline | None = None
    localized: bool = False
    """Only lost stages replay; needs a pipeline of 2 or more stages."""
    streaming: bool = True
    """Replay begins once the first slot is loaded; the other slots load meanwhile."""
    shares: np.ndarray | None = None
    """Token shares of the experts; None: the profile's, or equal shares."""
    by_popularity: bool = True
    interval_rule: IntervalRule = 'oracle'
    overhead_bound: Positive = 0.03
    experts: Whole | None = None
    saved: Whole | None = None
    """Experts of a layer in a checkpoint; with a profile it needs `experts`."""
    selection: Selection = 'sequential'
    lost_budget: Positive | None = None
    job_s: Positive | None = None
    copy_s: NotNegative | None = None


class System(Struct, frozen=True):
    """A system, ready for computation and simulation."""

    name: str
    costs: Dense | Sparse
    run: RunFactory | None = None
    """The simulated Run; None: simulate `costs`."""
    found: dict[str, float] = {}
    """Computed costs for the report: bytes, seconds, experts."""


def build(name: str, options: Options, profile: Profile | None = None) -> System:
    """Build the system called `name`, one of SYSTEMS.

    Raises:
        FieldError: a required field is missing, or breaks its rule.
        InfeasiblePlan: no window fits the profile's budget.
    """
    fields.require(name in SYSTEMS, 'system', name, f'one of {", ".join(SYSTEMS)}')
    if options.iteration_s is None:
        if profile is None:
            raise FieldError('iteration_s', 'is missing; give it, or a profile')
        options = replace(options, iteration_s=profile.iteration_s)
    elif profile is not None:
        profile = replace(profile, iteration_s=options.iteration_s)
    if profile is not None and options.pipeline is None:
        options = replace(options, pipeline=profile.pipeline)
    return _BUILDERS[name](name, options, profile)


def _dense(options: Options, **priced: float | None) -> Dense:
    interval = options.interval if options.interval is not None else priced.get('interval')
    if interval is None:
        raise FieldError('interval', 'is missing; give it, or a profile to price it from')
    assert options.iteration_s is not None

    def term(name: str) -> float:
        given = getattr(options, name)
        return float(given if given is not None else priced.get(name) or 0.0)

    overhead_s, stall_s, restart_s = map(term, ('overhead_s', 'stall_s', 'restart_s'))
    costs = options.iteration_s, int(interval), overhead_s, stall_s, restart_s, options.mtbf_s
    return Dense(*costs)


def _lag_s(iterations: float, profile: Profile) -> float:
    return math.ceil(iterations) * profile.iteration_s


def _given_dense(name: str, options: Options, profile: Profile | None) -> System:
    return System(name, _dense(options, restart_s=profile.restart_s if profile else 0.0))


def _none(name: str, options: Options, profile: Profile | None) -> System:
    if options.job_s is None:
        raise FieldError('job_s', 'is missing; without checkpoints its length matters')
    assert options.iteration_s is not None
    interval = max(1, round(options.job_s / options.iteration_s))
    return _given_dense(name, replace(options, interval=interval), profile)


def _checkfreq(name: str, options: Options, profile: Profile | None) -> System:
    if profile is None:
        return _given_dense(name, options, profile)
    stall_s = max(0.0, profile.state_bytes / profile.copy_bytes_per_s - profile.hidden_s)
    written_s = profile.written_s
    tuned = stall_s / (options.overhead_bound * profile.iteration_s)
    interval = max(1, math.ceil(tuned), math.ceil(written_s / profile.iteration_s))
    restart_s = profile.restart_s + written_s + _lag_s(written_s / profile.iteration_s, profile)
    costs = _dense(options, interval=interval, stall_s=stall_s, restart_s=restart_s)
    return System(name, costs, found={'checkpoint_bytes': profile.state_bytes})


def _gemini(name: str, options: Options, profile: Profile | None) -> System:
    if profile is None:
        return _given_dense(name, options, profile)
    own_s = profile.state_bytes / profile.copy_bytes_per_s
    everywhere_s = profile.state_bytes / profile.memory_bytes_per_s
    load_s = profile.state_bytes / profile.network_bytes_per_s
    stalls_s = max(0.0, own_s - profile.hidden_s)
    hides_rest = (everywhere_s - own_s + min(own_s, profile.hidden_s)) / profile.hidden_s

    def costs(interval: int) -> Dense:
        stall_s = max(stalls_s, everywhere_s - interval * profile.hidden_s)
        lag_s = _lag_s(min(interval, hides_rest), profile)
        restart_s = profile.restart_s + load_s + lag_s
        return _dense(options, interval=interval, stall_s=stall_s, restart_s=restart_s)

    interval = options.interval
    if interval is None and options.interval_rule == 'oracle':
        # A longer interval than these only loses more.
        young = young_s(stalls_s, options.mtbf_s) / profile.iteration_s
        longest = max(1, math.ceil(hides_rest), math.ceil(_finite(young)))
        interval = max(range(1, longest + 1), key=lambda n: costs(n).ettr_exact())
    elif interval is None:
        best = intervals.optimal(costs(1))
        seconds = best.young if options.interval_rule == 'young' else best.daly
        interval = int(_finite(seconds))
    return System(name, costs(interval), found={'checkpoint_bytes': profile.state_bytes})


def _finite(interval: float) -> float:
    """The interval of a rule. Raises FieldError if it is infinite."""
    if math.isinf(interval):
        raise FieldError('interval', 'is missing; without failures no interval is best')
    return interval


def _known_shares(options: Options, profile: Profile | None) -> np.ndarray | None:
    if options.shares is not None or profile is None:
        return options.shares
    return profile.token_shares()


def _shares(options: Options, profile: Profile | None) -> np.ndarray:
    """Token shares of the experts of a layer, equal if unknown.

    A profile has the experts of one rank, in all of its layers: their skew is known, but not their
    number in a layer.
    """
    known = _known_shares(options, profile)
    if profile is not None and options.saved is not None and options.experts is None:
        rule = "is missing; --saved-experts are some of a layer's, a profile has those of a rank"
        raise FieldError('experts', rule)
    if known is not None:
        return known if options.experts is None else spread_over(known, options.experts)
    if options.experts is None:
        raise FieldError('experts', 'is missing; give their number, or a profile with some')
    return np.full(options.experts, 1 / options.experts)


def _partial(
    name: str, full: Dense, partial: PartialExperts, options: Options, shares: np.ndarray
) -> System:
    job_s = options.job_s
    if job_s is None:
        raise FieldError('job_s', 'is missing; lost tokens are counted against the job')
    return System(
        name,
        with_experts(full, partial, partial.saved),
        lambda histories, rng: PartialRun(full, partial, shares, histories, job_s),
    )


def _moc(name: str, options: Options, profile: Profile | None) -> System:
    shares = _shares(options, profile)
    saved = options.saved if options.saved is not None else max(1, len(shares) // 8)
    part = profile.expert_bytes / profile.state_bytes if profile else 1.0
    partial = PartialExperts(len(shares), saved, options.selection, options.lost_budget, part)
    if profile is None:
        return _partial(name, _dense(options), partial, options, shares)
    interval = options.interval or 1
    copy_s = profile.state_bytes / profile.copy_bytes_per_s
    hidden_s = min(profile.hidden_s, copy_s)
    stall_s = copy_s - hidden_s
    if options.stall_s is None:
        partial = replace(partial, hidden_s=hidden_s)
    load_s = profile.state_bytes / profile.network_bytes_per_s
    if profile.disk_bytes_per_s is not None:
        load_s = profile.written_s
    restart_s = profile.restart_s + load_s + _lag_s(hidden_s / profile.hidden_s, profile)
    full = _dense(options, interval=interval, stall_s=stall_s, restart_s=restart_s)
    return _partial(name, full, partial, options, shares)


def _moetion(name: str, options: Options, profile: Profile | None) -> System:
    shares = _shares(options, profile)
    experts, saved = len(shares), options.saved
    if saved is None:
        if profile is None:
            raise FieldError('saved', 'is missing; give it, or a profile to price it from')
        budget = profile.hidden_s * profile.memory_bytes_per_s
        room = budget - (profile.state_bytes - profile.expert_bytes)
        saved = min(experts, max(1, int(room / max(1, profile.expert_bytes) * experts)))
    partial = PartialExperts(experts, saved, 'load-aware')
    overhead_s = restart_s = 0.0
    if profile is not None:
        copied = profile.state_bytes - profile.expert_bytes * (1 - saved / experts)
        exposed_s = max(0.0, copied / profile.memory_bytes_per_s - profile.hidden_s)
        overhead_s = exposed_s / partial.size(saved)  # for all experts; a part costs its share
        load_s = profile.state_bytes / profile.network_bytes_per_s
        restart_s = profile.restart_s + load_s + _lag_s(1, profile)
    full = _dense(options, interval=1, overhead_s=overhead_s, restart_s=restart_s)
    return _partial(name, full, partial, options, shares)


def _slot_bytes(name: str, options: Options, profile: Profile) -> np.ndarray:
    sizes = OperatorTable(
        [op.name for op in profile.operators],
        np.array([[op.full_bytes] for op in profile.operators]),
        np.array([[op.weight_bytes] for op in profile.operators]),
    )
    planner = plan_as_printed if name == 'moevement' else fewest_slots
    if options.window is not None:
        plan = balanced(sizes, options.window)
    else:
        plan = planner(sizes, max(1, int(profile.hidden_s * profile.memory_bytes_per_s)))
    return plan.slot_bytes(sizes)[:, 0]


def _sparse(name: str, options: Options, profile: Profile | None) -> System:
    assert options.iteration_s is not None
    window, overhead_s, slots = options.window, 0.0, np.zeros(0)
    found: dict[str, float] = {}
    if profile is not None:
        slots = _slot_bytes(name, options, profile)
        window = len(slots)
        exposed = slots / profile.memory_bytes_per_s - profile.hidden_s
        overhead_s = float(np.maximum(exposed, 0.0).mean())
        found = {'window_bytes': float(slots.sum()), 'largest_slot_bytes': float(slots.max())}
    if window is None:
        raise FieldError('window', 'is missing; give it, or a profile to plan it from')
    shares = _known_shares(options, profile)
    if options.shares is not None and not options.frozen_saving:
        rule = f'is missing; popularity matters to {name} where work on frozen operators is saved'
        raise FieldError('frozen_saving', rule)
    frozen = None
    if shares is not None:
        frozen = frozen_shares(shares, window, by_popularity=options.by_popularity)
    pipeline = options.pipeline if options.localized else None
    if options.localized and (pipeline is None or pipeline.stages < 2):
        raise FieldError('stages', 'is missing; localized recovery needs 2 stages or more')
    local_saving = options.local_saving
    if pipeline is not None:
        lost = max(1, pipeline.stages // pipeline.nodes)  # by one node
        local_saving = float(pipeline.local_saving(np.array([lost]))[0])
    costs = Sparse(
        iteration_s=options.iteration_s,
        window=window,
        overhead_s=overhead_s if options.overhead_s is None else options.overhead_s,
        restart_s=options.restart_s or 0.0,
        mtbf_s=options.mtbf_s,
        local_saving=local_saving,
        frozen_saving=options.frozen_saving,
        frozen_shares=frozen,
    )
    if options.restart_s is None and profile is not None:
        loaded_s = slots.cumsum() / profile.network_bytes_per_s
        loading_s = _waiting_s(loaded_s, costs) if options.streaming else loaded_s[-1]
        costs = replace(costs, restart_s=profile.restart_s + float(loading_s))
    if pipeline is None:
        return System(name, costs, found=found)
    return System(
        name, costs, lambda histories, rng: SparseRun(costs, histories, rng, pipeline), found
    )


def _waiting_s(loaded_s: np.ndarray, costs: Sparse) -> float:
    """Seconds that the conversion waits for slots, which are loaded after `loaded_s` [window].

    That is the whole load of the first slot, and the parts of other loads that iterations do not
    hide.
    """
    replayed_s = costs.conversion_s()
    return float((loaded_s - replayed_s.cumsum() + replayed_s).max())


def _copy(name: str, options: Options, profile: Profile | None) -> System:
    ours = _sparse(name, options, profile)
    pipeline = options.pipeline
    if pipeline is None or pipeline.copies < 2:
        raise FieldError('copies', 'is missing; copying needs 2 copies of the state or more')
    copy_s = options.copy_s
    if copy_s is None:
        copy_s = profile.state_bytes / profile.network_bytes_per_s if profile else 0.0
    sparse, restart_s = ours.costs, options.restart_s
    assert isinstance(sparse, Sparse)
    if restart_s is None:
        restart_s = profile.restart_s if profile else 0.0
    copied_s, localized = restart_s + copy_s, options.localized
    costs = Dense(sparse.iteration_s, 1, sparse.overhead_s, 0.0, copied_s, sparse.mtbf_s)

    def run(histories: int, rng: np.random.Generator) -> CopyRun:
        return CopyRun(sparse, copied_s, histories, rng, pipeline, localized)

    return System(name, costs, run, ours.found)


_BUILDERS: dict[str, Callable[[str, Options, Profile | None], System]] = {
    'none': _none,
    'dense': _given_dense,
    'checkfreq': _checkfreq,
    'gemini': _gemini,
    'moc': _moc,
    'moetion': _moetion,
    'moevement': _sparse,
    'ours': _sparse,
    'copy': _copy,
}
