# SPDX-License-Identifier: Apache-2.0
"""Makes workers report the state of every expert after each step, and the tokens of each slot."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import get_args

from megatron.moevement.job import session
from megatron.moevement.seams import expert_slots
from megatron.moevement.state import digest
from megatron.moevement.state.expert_replicas import ExpertReplicas
from tests.distributed.probes.training import report

STATES = 'states'
TOKENS = 'tokens'
POPULAR = (6.0, 2.0, 2.0, 2.0)
"""Tokens of the experts of `skewed_routing`, where tokens go to two experts of four."""


def states_after_each_step() -> None:
    """A list of digests by name of the tensor, an entry for each iteration."""
    step, train = session.Session.step, session.Session.train
    found: list[dict[str, str]] = []

    def stepped(self: Any, *args: Any) -> Any:
        result = step(self, *args)
        training = self.trainer.operators
        states = digest._tensors(training.model, training.optimizer)
        found.append({name: state for name, state in states if '.experts.' in name})
        return result

    def trained(self: Any, *args: Any) -> Any:
        result = train(self, *args)
        report(STATES, found)
        return result

    session.Session.step, session.Session.train = stepped, trained  # type: ignore[method-assign]


def popular_expert() -> None:
    """Layers are placed as if the first expert were popular."""
    expert_slots.ExpertSlots.tokens_of = lambda self, experts: POPULAR  # type: ignore


def skewed_routing() -> None:
    """All tokens go to the first expert, and half, a third and a sixth of them to the others.

    Reports tokens by expert and slot.
    """
    gating, spread, train = TopKRouter.gating, expert_slots.spread, session.Session.train
    found: list[tuple[list[int], list[int]]] = []

    def skewed(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = gating(self, tokens)
        more = torch.zeros_like(logits)
        more[..., 0] = 100
        others = torch.tensor([1, 1, 1, 2, 2, 3])[torch.arange(len(more)) % 6]
        more[torch.arange(len(more)), ..., others] = 50
        return logits + more

    def spreading(probs: Any, routed: torch.Tensor, *given: Any) -> Any:
        by_slot = spread(probs, routed, *given)
        found.append((routed.sum(0).tolist(), by_slot[1].sum(0).tolist()))
        return by_slot

    def trained(self: Any, *args: Any) -> Any:
        result = train(self, *args)
        report(TOKENS, found)
        return result

    TopKRouter.gating, expert_slots.spread = skewed, spreading
    session.Session.train = trained  # type: ignore[method-assign]


def killed_between_moves() -> None:
    """The second rank dies in the first rebalance, when it has moved the experts of one layer."""
    move = ExpertReplicas._move
    moved = []

    def moving(self: Any, *given: Any) -> int:
        args = get_args()
        died = Path(args.sparse_ckpt_digest).parent / 'died'
        if moved and args.rank == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        moved.append(given)
        return move(self, *given)

    ExpertReplicas._move = moving  # type: ignore[method-assign]
