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

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from moevement_ext.plan.byte_planner import balanced, fewest_slots
from moevement_ext.plan.strategy.dense import best_interval

from ..lab.fields import FieldError, require
from ..model.algorithm1 import plan_as_printed
from .closed_form import Dense, Sparse
from .experts import frozen_shares, lost_by_checkpoint, spread_over
from .monte_carlo import Pipeline, RunFactory, SparseRun
from .profile import Profile


class Options(Struct, frozen=True):
    """Known values of a system; None: computed from the profile. The flags check them."""

    iteration_s: float | None = None
    interval: int | None = None
    window: int | None = None
    overhead_s: float | None = None
    stall_s: float | None = None
    restart_s: float | None = None
    mtbf_s: float = math.inf
    local_saving: float = 0.0
    frozen_saving: float = 0.0
    pipeline: Pipeline | None = None
    recovery: str = 'global'
    """'localized': only lost stages replay; needs a pipeline of 2 or more stages."""
    restore: str = 'streaming'
    """Replay begins once the first slot is loaded, the others load meanwhile; else 'whole'."""
    shares: np.ndarray | None = None
    """Token shares of the experts; None: the profile's, or equal shares."""
    order: str = 'popularity'
    interval_rule: str = 'oracle'
    overhead_bound: float = 0.03
    experts: int | None = None
    saved_experts: int | None = None
    """Experts of a layer in a checkpoint; with a profile it needs `experts`."""
    selection: str = 'sequential'
    job_hours: float | None = None
    copy_s: float | None = None

    @property
    def each_s(self) -> float:
        """Seconds of an iteration. Raises FieldError: they are unknown."""
        return self.need('iteration_time', self.iteration_s, 'give it, or a profile')

    def need[Value](self, field: str, value: Value | None, otherwise: str) -> Value:
        """The value of a field. Raises FieldError: it is missing."""
        if value is None:
            raise FieldError(field, f'is missing; {otherwise}')
        return value


class System(Struct, frozen=True):
    """A system, ready for computation and simulation."""

    name: str
    costs: Dense | Sparse
    run: RunFactory | None = None
    """The simulated Run; None: simulate `costs`."""
    found: dict[str, float] = {}
    """Computed costs for the report: bytes, seconds, shares."""


def build(name: str, options: Options, profile: Profile | None = None) -> System:
    """Build the system called `name`, one of SYSTEMS.

    Raises:
        FieldError: a required field is missing, or breaks its rule.
        InfeasiblePlan: no window fits the profile's budget.
    """
    if profile is not None:
        profile = replace(profile, iteration_s=options.iteration_s or profile.iteration_s)
        pipeline = options.pipeline or profile.pipeline
        options = replace(options, iteration_s=profile.iteration_s, pipeline=pipeline)
    return _BUILDERS[name](name, options, profile)


def _dense(options: Options, interval: int | None = None, **priced: float) -> Dense:
    """Dense checkpoints, with the priced costs where no option gives them."""
    missing = 'give it, or a profile to price it from'
    period = options.need('interval', options.interval or interval, missing)
    costs = {
        name: priced.get(name, 0.0) if getattr(options, name) is None else getattr(options, name)
        for name in ('overhead_s', 'stall_s', 'restart_s')
    }
    return Dense(options.each_s, period, mtbf_s=options.mtbf_s, **costs)


def _lag_s(iterations: float, profile: Profile) -> float:
    return math.ceil(iterations) * profile.iteration_s


def _whole(name: str, options: Options, profile: Profile | None) -> System:
    """Dense checkpoints of everything; without a profile or a rule as given."""
    if name == 'none':
        missing = 'without checkpoints its length matters'
        hours = options.need('job_hours', options.job_hours, missing)
        options = replace(options, interval=max(1, round(3600 * hours / options.each_s)))
    if profile is None or name not in _PRICES:
        return System(name, _dense(options, restart_s=profile.restart_s if profile else 0.0))
    found: dict[str, float] = {'checkpoint_bytes': profile.state_bytes}
    return System(name, _PRICES[name](options, profile), found=found)


def _checkfreq(options: Options, profile: Profile) -> Dense:
    stall_s = max(0.0, profile.own_s - profile.hidden_s)
    tuned = stall_s / (options.overhead_bound * profile.iteration_s)
    writes = profile.written_s / profile.iteration_s
    restart_s = profile.restart_s + profile.written_s + _lag_s(writes, profile)
    interval = max(1, math.ceil(tuned), math.ceil(writes))
    return _dense(options, interval, stall_s=stall_s, restart_s=restart_s)


def _gemini(options: Options, profile: Profile) -> Dense:
    own_s, everywhere_s, hidden_s = profile.own_s, profile.everywhere_s, profile.hidden_s
    interval, least_s = options.interval, max(0.0, own_s - hidden_s)
    if interval is None:
        endless = math.isinf(options.mtbf_s) and max(least_s, everywhere_s - hidden_s) > 0
        known = None if endless else (own_s, everywhere_s)
        times = options.need('interval', known, 'without failures no interval is best')
        interval = best_interval(options.interval_rule, profile.iteration_s, times, options.mtbf_s)
    hides_rest = (everywhere_s - own_s + min(own_s, hidden_s)) / hidden_s
    lag_s = _lag_s(min(interval, hides_rest), profile)
    stall_s = max(least_s, everywhere_s - interval * hidden_s)
    restart_s = profile.restart_s + profile.load_s + lag_s
    return _dense(options, interval, stall_s=stall_s, restart_s=restart_s)


_PRICES = {'checkfreq': _checkfreq, 'gemini': _gemini}


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
    rule = 'give their number, or a profile with some'
    if profile is not None and options.saved_experts is not None:
        rule = "--saved-experts are some of a layer's, a profile has those of a rank"
        known = None if options.experts is None else known
    if known is None:
        experts = options.need('experts', options.experts, rule)
        return np.full(experts, 1 / experts)
    return known if options.experts is None else spread_over(known, options.experts)


def _moc(name: str, options: Options, profile: Profile | None) -> System:
    """Checkpoints of some experts, of which failures lose tokens."""
    shares = _shares(options, profile)
    saved = options.saved_experts or max(1, len(shares) // 8)
    require(saved <= len(shares), 'saved_experts', saved, f'only {len(shares)} can be saved')
    if profile is None:
        full, hidden_s, part = _dense(options), 0.0, 1.0
    else:
        hidden_s = min(profile.hidden_s, profile.own_s)
        load_s = profile.load_s if profile.disk_bytes_per_s is None else profile.written_s
        restart_s = profile.restart_s + load_s + _lag_s(hidden_s / profile.hidden_s, profile)
        full = _dense(options, 1, stall_s=profile.own_s - hidden_s, restart_s=restart_s)
        hidden_s = hidden_s if options.stall_s is None else 0.0
        part = profile.expert_bytes / profile.state_bytes
    size = 1 - part * (1 - saved / len(shares))
    stall_s = max(0.0, (full.stall_s + hidden_s) * size - hidden_s)
    lost = float(lost_by_checkpoint(shares, saved, options.selection).mean()) * full.period
    found = {
        'lost_tokens_per_failure_iterations': lost,
        'lost_tokens_share': lost * full.iteration_s / full.mtbf_s,
    }
    costs = replace(full, overhead_s=full.overhead_s * size, stall_s=stall_s)
    return System(name, costs, found=found)


def _slot_bytes(name: str, options: Options, profile: Profile) -> np.ndarray:
    planner = plan_as_printed if name == 'moevement' else fewest_slots
    if options.window is not None:
        plan = balanced(profile.table, options.window)
    else:
        budget = max(1, int(profile.hidden_s * profile.memory_bytes_per_s))
        plan = planner(profile.table, budget)
    return plan.slot_bytes(profile.table)[:, 0]


def _sparse(name: str, options: Options, profile: Profile | None) -> System:
    window, overhead_s, slots = options.window, 0.0, np.zeros(0)
    found: dict[str, float] = {}
    if profile is not None:
        slots = _slot_bytes(name, options, profile)
        window = len(slots)
        exposed = slots / profile.memory_bytes_per_s - profile.hidden_s
        overhead_s = float(np.maximum(exposed, 0.0).mean())
        found = {'window_bytes': float(slots.sum()), 'largest_slot_bytes': float(slots.max())}
    window = options.need('window', window, 'give it, or a profile to plan it from')
    if options.shares is not None and not options.frozen_saving:
        rule = f'is missing; popularity matters to {name} where work on frozen operators is saved'
        raise FieldError('frozen_saving', rule)
    shares, frozen = _known_shares(options, profile), None
    if shares is not None:
        frozen = frozen_shares(shares, window, by_popularity=options.order == 'popularity')
    pipeline, local_saving = None, options.local_saving
    if options.recovery == 'localized':
        pipeline = options.pipeline
        if pipeline is None or pipeline.stages < 2:
            raise FieldError('stages', 'is missing; localized recovery needs 2 stages or more')
        lost = max(1, pipeline.stages // pipeline.nodes)  # by one node
        local_saving = float(pipeline.local_saving(np.array(lost)))
    costs = Sparse(
        iteration_s=options.each_s,
        period=window,
        overhead_s=overhead_s if options.overhead_s is None else options.overhead_s,
        restart_s=options.restart_s or 0.0,
        mtbf_s=options.mtbf_s,
        local_saving=local_saving,
        frozen_saving=options.frozen_saving,
        frozen_shares=frozen,
    )
    if options.restart_s is None and profile is not None:
        loaded_s = slots.cumsum() / profile.network_bytes_per_s
        loading_s = _waiting_s(loaded_s, costs) if options.restore == 'streaming' else loaded_s[-1]
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
    replayed_s = costs.conversion() * costs.iteration_s * (1 - costs.local_saving)
    return float((loaded_s - replayed_s.cumsum() + replayed_s).max())


def _copy(name: str, options: Options, profile: Profile | None) -> System:
    ours = _sparse(name, options, profile)
    sparse, nodes = ours.costs, options.pipeline
    assert isinstance(sparse, Sparse)
    if nodes is None or nodes.copies < 2:
        raise FieldError('copies', 'is missing; copying needs 2 copies of the state or more')
    restart_s, copy_s = (profile.restart_s, profile.load_s) if profile else (0.0, 0.0)
    copied_s = restart_s if options.restart_s is None else options.restart_s
    copied_s += copy_s if options.copy_s is None else options.copy_s
    localized = nodes if options.recovery == 'localized' else None
    return System(
        name,
        Dense(sparse.iteration_s, 1, sparse.overhead_s, copied_s, sparse.mtbf_s),
        lambda histories, rng: SparseRun(sparse, histories, rng, localized, (nodes, copied_s)),
        ours.found,
    )


_BUILDERS: dict[str, Callable[[str, Options, Profile | None], System]] = {
    **dict.fromkeys(('none', 'dense', 'checkfreq', 'gemini'), _whole),
    'moc': _moc,
    **dict.fromkeys(('moevement', 'ours'), _sparse),
    'copy': _copy,
}
SYSTEMS = tuple(_BUILDERS)
