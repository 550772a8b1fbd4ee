# SPDX-License-Identifier: Apache-2.0
"""Laws of the division of tokens over replicas; `tests/distributed` trains with slots."""

from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from megatron.moevement.seams.expert_slots import SlotTable, refuse, sent, spread
from moevement_ext.config import ConfigurationError, SparseCheckpointConfig
from tests.unit.megatron.moevement.job.test_identity import parsed


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A placement, and the experts of the tokens of each rank, bool [ranks, tokens, experts]."""
    ranks, experts = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    slots = draw(st.integers(-(-experts // ranks), 4 + experts // ranks))
    rest = ranks * slots - experts
    more = draw(st.lists(st.integers(0, experts - 1), min_size=rest, max_size=rest))
    placed = draw(st.permutations([*range(experts), *more]))
    rows = [placed[rank * slots :][:slots] for rank in range(ranks)]
    tokens = draw(st.integers(0, 12))
    size = ranks * tokens * experts
    routed = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    return torch.tensor(rows), routed.bool().view(ranks, tokens, experts)


@drawn(routings())
def test_every_replica_gets_its_share_and_no_token_is_lost(case: Any) -> None:
    placement, routed = case
    table, counts = SlotTable(placement, routed.shape[2]), routed.sum(1)
    matrix = torch.stack([sent(counts, table.held, rank) for rank in range(len(counts))])
    assert torch.equal(matrix.sum(1), counts) and bool((matrix >= 0).all())
    received = matrix.sum(0)
    # k slots of an expert weigh as much as k replicas: equal shares, up to one token.
    excess = received * table.held.sum(0) - counts.sum(0) * table.held
    assert bool((excess.abs() < table.held.sum(0).clamp(min=1)).all())
    own = matrix.diagonal().T
    assert torch.equal(own, torch.minimum(counts, received)), 'own tokens first'


@drawn(routings())
def test_tokens_go_once_to_a_slot_of_each_of_their_experts(case: Any) -> None:
    placement, routed = case
    table, counts = SlotTable(placement, routed.shape[2]), routed.sum(1)
    expert_in = placement.flatten()
    for rank, own in enumerate(routed):
        probs = torch.rand(own.shape) * own
        by_slot_probs, by_slot = spread(probs, own, counts, table, rank)
        token, slot = by_slot.nonzero(as_tuple=True)
        found = torch.zeros_like(own, dtype=torch.int64)
        found.index_put_((token, expert_in[slot]), torch.ones_like(slot), accumulate=True)
        assert torch.equal(found, own.long())
        assert torch.equal(by_slot_probs[token, slot], probs[token, expert_in[slot]])
        assert int((by_slot_probs != 0).sum()) == int((probs != 0).sum())
        ranks = by_slot.sum(0).view(len(counts), -1)  # [ranks, slots of a rank]
        expected = sent(counts, table.held, rank)
        for other, row in enumerate(placement.tolist()):
            for at, expert in enumerate(row):
                first = at == row.index(expert)
                assert ranks[other, at] == (expected[other, expert] if first else 0)


def test_gradient_reaches_the_router() -> None:
    table = SlotTable(torch.tensor([(0, 1), (1, 1)]), 2)
    routed = torch.tensor([[True, False], [True, True], [False, True]])
    probs = torch.rand(3, 2, requires_grad=True)
    by_slot, _ = spread(probs, routed, torch.tensor([[2, 2], [0, 3]]), table, 0)
    by_slot.sum().backward()
    assert probs.grad is not None and torch.equal(probs.grad, routed.float())


WORKS = (
    '--num-experts 4 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 '
    '--moe-token-dispatcher-type alltoall'
)


def judged(flags: str = '', own_loop: bool = False, **config: Any) -> None:
    settings = vars(parsed(*WORKS.split(), *flags.split())) | {'world_size': 4}
    refuse(settings, SparseCheckpointConfig(**{'expert_slots': 3, **config}), own_loop)


@pytest.mark.parametrize(
    ('given', 'named'),
    [
        ({'flags': '--moe-expert-capacity-factor 1.5'}, 'with --moe-expert-capacity-factor 1.5'),
        ({'flags': '--moe-grouped-gemm'}, 'with --moe-grouped-gemm True'),
        ({'flags': '--save /tmp/dense'}, 'with --save /tmp/dense'),
        ({'flags': '--num-experts 0'}, 'without --num-experts'),
        ({'flags': '--pipeline-model-parallel-size 1'}, '2, which must be all 4 ranks of a stage'),
        ({'strategy': 'moc'}, 'with --sparse-ckpt-strategy moc'),
        ({'elastic': 'restart'}, 'with --sparse-ckpt-elastic restart'),
        (
            {'expert_rebalance': 5, 'window': 6},
            'expert_rebalance 5 must be at least 6, the longest',
        ),
        ({'expert_slots': 1}, r'2 slots \(2 x 1\) must be .* 4 experts'),
        ({'own_loop': True}, "a loop that is not upstream's"),
    ],
)
def test_what_slots_do_not_work_with_is_refused(given: dict, named: str) -> None:
    judged()
    with pytest.raises(ConfigurationError, match=named):
        judged(**given)
