# SPDX-License-Identifier: Apache-2.0
"""Experts in slots: replicas stay equal, and no rank has many more tokens than others."""

import re

import pytest

from tests.distributed.conftest import Make, differences, read_digest
from tests.distributed.harness.cluster import Cluster
from tests.distributed.probes.expert_slots import STATES, TOKENS
from tests.distributed.probes.training import read
from tests.distributed.test_whole_job_recovery import BF16, ITERATIONS, UNTIED

EXPERTS = 4
RANKS = 4
LAYOUT = f'{BF16} {UNTIED} {ITERATIONS} --expert-model-parallel-size 4'
# Three holders of each expert: with two, the order of a sum has no effect.
FLAGS = [*LAYOUT.split(), 'expert_slots=3', '--sparse-ckpt-window', '3']
PIPELINE = '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2'.split()
NOTED = 'probes.expert_slots:states_after_each_step'
POPULAR = 'probes.expert_slots:popular_expert'
SKEWED = f'{NOTED},probes.expert_slots:skewed_routing'
REBALANCED = [*FLAGS, 'expert_rebalance=4']  # a window of 3 is given up at iterations 4 and 8
LAYOUTS = {
    'even': (FLAGS, '', {3}),
    'popular': (FLAGS, POPULAR, {2}),  # two ranks have one expert in all slots
    'pipeline': ([*FLAGS, *PIPELINE], '', {1, 2}),
}
"""Flags, a probe, and the numbers of ranks that have an expert."""


def states_by_iteration(job: Cluster) -> list[dict[str, list[str]]]:
    """Digests of all ranks that have a tensor of an expert."""
    by_rank = read(job.directory, STATES, job.ranks)
    return [
        {name: [one[name] for one in states if name in one] for name in set[str]().union(*states)}
        for states in zip(*by_rank, strict=True)
    ]


@pytest.mark.parametrize('placed', LAYOUTS)
def test_replicas_are_equal_after_every_step(placed: str, cluster: Make) -> None:
    flags, probe, ranks = LAYOUTS[placed]
    probes = ','.join(filter(None, [NOTED, probe]))
    job = cluster(*flags)
    job.finish(mutation=probes)
    iterations = states_by_iteration(job)
    assert len(iterations) == 12
    for states in iterations:
        assert {len(set(found)) for found in states.values()} == {1}
    assert {len(found) for found in iterations[-1].values()} == ranks
    assert {name.split('local_experts.')[1][0] for name in iterations[-1]} == {*'0123'}
    again = cluster(*flags)
    if placed == 'popular':
        assert -9 in again.run(fail_at='1:8:reduce', mutation=probes)
        again.finish(mutation=probes)
    else:
        assert again.survive(fail_at='1:8:forward') == {1: 1}
    assert differences(read_digest(job), read_digest(again)) == []


def test_placement_follows_the_tokens_through_a_failure(cluster: Make) -> None:
    job, again = cluster(*REBALANCED), cluster(*REBALANCED)
    job.finish(mutation=SKEWED)
    plain, slots = [], []
    for ranks in zip(*read(job.directory, TOKENS, RANKS), strict=True):
        by_expert = [sum(column) for column in zip(*(one[0] for one in ranks), strict=True)]
        by_slot = [sum(column) for column in zip(*(one[1] for one in ranks), strict=True)]
        of_ranks = [sum(by_slot[rank * 3 : rank * 3 + 3]) for rank in range(RANKS)]
        assert sum(of_ranks) == sum(by_expert)
        mean = sum(by_expert) / RANKS
        plain.append(max(by_expert) / mean)  # one expert a rank
        slots.append(max(of_ranks) / mean)
    slots = slots[len(slots) // 3 :]  # after the first rebalance
    print(f'busiest rank over the mean: {max(slots):.3f}, one expert a rank {min(plain):.3f}')
    assert max(slots) <= 1.15 and min(plain) >= 1.6
    for states in states_by_iteration(job):
        assert {len({*found}) for found in states.values()} == {1}
    first, _, last = told = re.findall(
        r'after iteration (\d+): (\d+) of (\d+) bytes', job.output(0)
    )
    assert [iteration for iteration, *_ in told] == ['4', '8', '12']
    assert all(int(moved) < int(total) for _, moved, total in told) and int(first[1]) > 0
    assert again.survive(fail_at='1:6:forward', mutation=SKEWED) == {1: 1}
    assert differences(read_digest(job), read_digest(again)) == []


@pytest.mark.thorough
@pytest.mark.parametrize('layout', [[], PIPELINE], ids=['', 'pipeline'])
def test_rank_that_dies_between_moves(layout: list[str], cluster: Make) -> None:
    job, again = cluster(*REBALANCED, *layout), cluster(*REBALANCED, *layout)
    job.finish()
    assert again.survive(mutation='probes.expert_slots:killed_between_moves') == {1: 1}
    assert differences(read_digest(job), read_digest(again)) == []
    whole = cluster(*REBALANCED, *layout)
    assert -9 in whole.run(fail_at='1:11:forward')
    whole.finish()
    assert differences(read_digest(job), read_digest(whole)) == []


def test_experts_that_ranks_do_not_divide(cluster: Make) -> None:
    layout = LAYOUT.replace('size 4', 'size 3').split()
    job = cluster(*layout, 'expert_slots=2', '--global-batch-size', '6', ranks=3, nodes=3)
    job.finish(mutation=NOTED)
    for states in states_by_iteration(job):
        assert {len({*found}) for found in states.values()} == {1}
    assert 'each expert: 1, not 2, as 3 ranks have 6 slots for 4 experts' in job.output(0)


@pytest.mark.mutation
@pytest.mark.thorough
@pytest.mark.parametrize(
    'mutation',
    ['own_tokens_not_first', 'sum_not_in_order', 'replica_counted_twice_in_the_norm'],
)
def test_broken_slots_turn_bits_red(mutation: str, cluster: Make) -> None:
    job, broken = cluster(*FLAGS), cluster(*FLAGS)
    job.finish()
    broken.finish(mutation=f'{NOTED},mutations.expert_slots:{mutation}')
    assert differences(read_digest(job), read_digest(broken)) != []
    iterations = states_by_iteration(broken)
    equal = all(len({*found}) == 1 for states in iterations for found in states.values())
    assert equal == (mutation != 'sum_not_in_order')


@pytest.mark.mutation
@pytest.mark.thorough
@pytest.mark.parametrize(
    'mutation',
    [
        'window_goes_across_a_rebalance',
        'moments_stay_behind',
        'placement_left_out_of_windows',
    ],
)
def test_broken_rebalance_turns_bits_red(mutation: str, cluster: Make) -> None:
    job, broken = cluster(*REBALANCED), cluster(*REBALANCED)
    job.finish()
    mutation = f'mutations.expert_slots:{mutation}'
    assert -9 in broken.run(fail_at='1:8:forward', mutation=mutation)
    broken.finish(mutation=mutation)
    # Other bits lead to other placements, so that names may differ as well.
    assert read_digest(job)['ranks'] != read_digest(broken)['ranks']
