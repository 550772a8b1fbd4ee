# SPDX-License-Identifier: Apache-2.0
r"""Computes the probability that copies of ranks, or replicas of experts, survive failures.

    moevement simulate placement ranks --nodes 12 --gpus-per-node 8 --failed 4
    moevement simulate placement ranks --nodes 64 --gpus-per-node 8 --nodes-per-switch 8 \
        --same-state 2
    moevement simulate placement experts --nodes 10 --slots 6 --experts 16 --least 2 --skew 2 \
        --failed 4

`ranks` places 1, 2 and 3 copies of each rank's state on other nodes, as training does, and prints
the probability that all state survives a random set of failed nodes. `experts` compares Lazarus'
maximum rank overlap with evenly distributed replicas.

Maximum rank overlap is the placement of Lazarus (Wu et al., arXiv 2407.04656): experts are sorted
by their number of replicas and divided into groups of as many experts as a node has slots; the
first of a group, its representative, has the fewest replicas. Each group gets as many nodes as its
representative has replicas, with all of the group's experts on each node. Experts that fail
together count once, so few sets of failed nodes lose an expert. The placement is optimal if the
nodes of all representatives exist (docs/paper.md).

Exit status: 0 done, 2 the input is impossible.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import batched, combinations
from statistics import mean
from typing import Any

import numpy as np

from moevement_ext.replicate.placement import place_copies

from ..lab.arguments import Parser
from ..model.command import add_flags_of, records, show

Placement = list[tuple[int, ...]]
"""Experts in the slots of each node."""

ENUMERATION_LIMIT = 200_000
SAMPLES = 100_000
"""Sets of failed domains that are drawn where there are too many to enumerate."""
SPREADS = 20
_CHUNK = 4096


# ---- copies of ranks' states


def survival_report(
    domains: Sequence[str],
    failed: Iterable[int],
    groups: Sequence[Sequence[int]] | None = None,
    distance: Callable[[int, int], float] | None = None,
) -> list[dict[str, Any]]:
    """Placements of 1, 2 and 3 replicas by `place_copies`, and their survival of failed domains.

    `groups` are ranks with the same state, `distance` that from an owner to a holder.
    `holders` is the least number of ranks with a copy of a rank's state beyond those of its group,
    `load` how many owners' copies a rank holds, least and most; the standard error is 0 only after
    an exact enumeration. Raises ValueError if more domains fail than exist.
    """
    counts, found = list(failed), []
    family = {rank: min(members) for members in groups or () for rank in members}
    families = [family.get(rank, rank) for rank in range(len(domains))]
    for replicas in (1, 2, 3):
        holders = place_copies(domains, replicas, families).holders
        held = Counter(rank for held_by in holders for rank in held_by)
        loads = [held[rank] for rank in range(len(domains))]
        pairs = [(owner, rank) for owner, held_by in enumerate(holders) for rank in held_by]
        away = [distance(*pair) for pair in pairs] if distance else []
        survival = []
        for lost in counts:
            probability = survival_probability(domains, holders, lost, groups=groups)
            # Two more of each kind, as samples without any loss prove nothing (Agresti and Coull).
            share = (probability * SAMPLES + 2) / (SAMPLES + 4)
            exact = is_exact(len(set(domains)), lost)
            error = 0.0 if exact else math.sqrt(share * (1 - share) / (SAMPLES + 4))
            survival.append({'failed': lost, 'probability': probability, 'standard_error': error})
        found.append({
            'replicas': replicas,
            'holders': min(map(len, holders), default=0),
            'load': (min(loads, default=0), max(loads, default=0)),
            'mean_distance': mean(away) if away else None,
            'survival': survival,
        })  # fmt: skip
    return found


def survival_probability(
    domains: Sequence[str],
    holders: Sequence[Sequence[int]],
    failed_domains: int,
    groups: Sequence[Sequence[int]] | None = None,
) -> float:
    """Probability that every rank's state survives a simultaneous loss of `failed_domains` domains.

    A rank's state survives in the owner, in its holders (by owner), and in the ranks of its group,
    which have the same state, and their holders.
    """
    index = {name: position for position, name in enumerate(sorted(set(domains)))}
    kept = np.zeros((len(domains), len(index)), dtype=bool)
    for owner, held_by in enumerate(holders):
        kept[owner, [index[domains[rank]] for rank in (owner, *held_by)]] = True
    for members in groups or ():
        kept[list(members)] = kept[list(members)].any(axis=0)
    return copies_survival(kept, failed_domains)


def copies_survival(kept: np.ndarray, failed_domains: int) -> float:
    """Probability that each item keeps a copy when `failed_domains` random domains are lost.

    `kept` is bool, shape [items, domains]: whether a domain has a copy of an item. Exact, by
    enumeration, where `is_exact`, else from random sets.
    """
    domains = kept.shape[1]
    if not 0 <= failed_domains <= domains:
        raise ValueError(f'--failed {failed_domains}: there are {domains} nodes')
    kept = np.unique(kept, axis=0).astype(np.float32)
    sets = _all_sets if is_exact(domains, failed_domains) else _random_sets
    survived = tried = 0
    for chosen in sets(domains, failed_domains):
        failed = np.zeros((len(chosen), domains), dtype=np.float32)
        np.put_along_axis(failed, chosen, 1, axis=1)
        lost = failed @ kept.T == kept.sum(axis=1)
        survived += int((~lost.any(axis=1)).sum())
        tried += len(failed)
    return survived / tried


def is_exact(domains: int, failed_domains: int) -> bool:
    """True if a survival probability is found by enumeration, not by sampling."""
    return math.comb(domains, failed_domains) <= ENUMERATION_LIMIT


def _all_sets(count: int, failed: int) -> Iterator[np.ndarray]:
    """Every set of `failed` of `count`, int64 (sets, failed) at a time."""
    for chunk in batched(combinations(range(count), failed), _CHUNK):
        yield np.array(chunk, dtype=np.int64).reshape(len(chunk), failed)


def _random_sets(count: int, failed: int) -> Iterator[np.ndarray]:
    generator = np.random.default_rng(0)
    for start in range(0, SAMPLES, _CHUNK):
        order = generator.random((min(_CHUNK, SAMPLES - start), count)).argpartition(failed, axis=1)
        yield order[:, :failed]


# ---- replicas of experts


def allocate_replicas(tokens: Sequence[float], nodes: int, slots: int, least: int = 1) -> list[int]:
    """Replicas of each expert, by its token share but at least `least` >= 1 (Lazarus, sec. 4).

    Experts take their shares of the remaining slots, those with the fewest tokens first; the last
    expert takes the remainder, so that all `nodes` x `slots` slots are used.
    """
    total = nodes * slots
    if len(tokens) * least > total:
        raise ValueError(
            f'{len(tokens)} experts with at least {least} replicas need more than the {total} '
            f'slots of {nodes} nodes; lower least, or add nodes or slots'
        )
    replicas = [0] * len(tokens)
    free, load = total, float(sum(tokens))
    order = sorted(range(len(tokens)), key=lambda expert: tokens[expert])
    for position, expert in enumerate(order):
        later = (len(order) - position - 1) * least
        share = free * tokens[expert] / load if load else free / (len(order) - position)
        replicas[expert] = min(max(int(share), least), free - later) if later else free
        free -= replicas[expert]
        load -= tokens[expert]
    return replicas


def maximum_rank_overlap(replicas: Sequence[int], nodes: int, slots: int) -> Placement:
    """Lazarus' placement of experts with `replicas` each on `nodes` of `slots` slots."""
    order = sorted(range(len(replicas)), key=lambda expert: replicas[expert])
    held: list[list[int]] = [[] for _ in range(nodes)]
    first = 0
    for group in batched(order, slots):
        last = min(nodes, first + replicas[group[0]])
        for node in held[first:last]:
            node.extend(group)
        first = last
    placed = Counter(expert for node in held for expert in node)
    for expert in order:
        for _ in range(replicas[expert] - placed[expert]):
            _put(expert, held, slots, range(nodes))
    return [tuple(node) for node in held]


def spread(replicas: Sequence[int], nodes: int, slots: int, seed: int = 0) -> Placement:
    """Put each replica on a node with most free slots and no such replica; ties drawn by `seed`.

    A placement that balances slots and ignores failures.
    """
    random = np.random.default_rng(seed)
    held: list[list[int]] = [[] for _ in range(nodes)]
    for expert in sorted(range(len(replicas)), key=lambda expert: -replicas[expert]):
        for _ in range(replicas[expert]):
            _put(expert, held, slots, random.permutation(nodes).tolist())
    return [tuple(node) for node in held]


def recovery_probability(placement: Placement, failed_nodes: int) -> float:
    """Probability that `failed_nodes` random nodes leave a replica of each placed expert.

    Exact by enumeration for small numbers (see `is_exact`), else sampled.
    """
    experts = max((expert for node in placement for expert in node), default=-1) + 1
    kept = np.zeros((experts, len(placement)), dtype=bool)
    for node, held in enumerate(placement):
        kept[list(held), node] = True
    return copies_survival(kept[kept.any(axis=1)], failed_nodes)


def _put(expert: int, held: list[list[int]], slots: int, ties: Sequence[int]) -> None:
    """Put an expert on the emptiest node with a free slot, preferably one without the expert."""
    free = [node for node in ties if len(held[node]) < slots]
    held[min(free, key=lambda node: (expert in held[node], len(held[node])))].append(expert)


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        found = args.report(args)
    except ValueError as error:
        print(f'placement: {error}', file=sys.stderr)
        return 2
    if args.json or 'placements' not in found:
        show(found, as_json=args.json)
    else:
        records([_row(one) for one in found['placements']], 'Probability that nothing is lost')
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog='moevement simulate placement', description=__doc__.split('\n')[0])
    commands = parser.add_subparsers(required=True)
    for name, report in (('ranks', ranks_report), ('experts', experts_report)):
        command = commands.add_parser(name)
        command.set_defaults(report=report)
        assert __package__
        add_flags_of(command, __package__, f'{name}.toml')
    return parser.parse_args(argv)


def ranks_report(args: argparse.Namespace) -> dict[str, Any]:
    """Placements of 1 to 3 copies. Raises ValueError if flags contradict each other."""
    ranks = args.nodes * args.gpus_per_node
    if ranks % args.same_state:
        raise ValueError(f'--same-state {args.same_state}: must divide the {ranks} ranks')
    domains = [f'node{rank // args.gpus_per_node:05}' for rank in range(ranks)]
    if args.nodes_per_switch:
        ranks_per_switch = args.nodes_per_switch * args.gpus_per_node
        domains = [f'{rank // ranks_per_switch}/{name}' for rank, name in enumerate(domains)]
    apart = ranks // args.same_state
    groups = [list(range(first, ranks, apart)) for first in range(apart)]

    def hops(owner: int, holder: int) -> float:
        return float(owner // ranks_per_switch != holder // ranks_per_switch)

    placements = survival_report(
        domains,
        range(1, args.failed + 1),
        groups=groups if args.same_state > 1 else None,
        distance=hops if args.nodes_per_switch else None,
    )
    return {'nodes': args.nodes, 'ranks': ranks, 'placements': placements}


def experts_report(args: argparse.Namespace) -> dict[str, Any]:
    """Both placements, and the probabilities that every expert survives 1, 2, ... failures.

    Raises ValueError if experts do not fit.
    """
    tokens = [(expert + 1) ** args.skew for expert in range(args.experts)]
    shape = (args.nodes, args.slots)
    replicas = allocate_replicas(tokens, *shape, args.least)
    firsts = sorted(replicas)[:: args.slots]  # of the representative of each group
    overlap = maximum_rank_overlap(replicas, *shape)
    spreads = [spread(replicas, *shape, seed) for seed in range(SPREADS)]
    lost = range(1, args.failed + 1)
    return {
        'replicas': tuple(replicas),
        'representatives': tuple(firsts),
        'representatives_fit': sum(firsts) <= args.nodes,
        'maximum_rank_overlap': tuple(recovery_probability(overlap, count) for count in lost),
        'spread': tuple(mean(recovery_probability(one, n) for one in spreads) for n in lost),
        'nodes': tuple(overlap),
    }


def _row(placed: dict[str, Any]) -> dict[str, str]:
    away, row = placed['mean_distance'], {}
    for lost in placed['survival']:
        error = f' ±{lost["standard_error"]:.4f}' if lost['standard_error'] else ''
        row[f'{lost["failed"]} failed'] = f'{lost["probability"]:.4f}{error}'
    return {
        'copies': str(placed['replicas']),
        'holders': str(placed['holders']),
        'load': ' to '.join(map(str, sorted(set(placed['load'])))),
        'links between switches': '' if away is None else f'{away:.0%}',
        **row,
    }


if __name__ == '__main__':
    sys.exit(main())
