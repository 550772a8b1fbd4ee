# SPDX-License-Identifier: Apache-2.0
"""Emulates upstream's behaviour in other installations, as far as possible without them.

Also with a step of recovery left out that only these need.
"""

import os
import re
import signal
from contextlib import nullcontext
from functools import wraps
from typing import Any

import megatron.training.training as training
import torch
from megatron.core import optimizer as upstream
from megatron.core.models import backends
from megatron.core.optimizer import clip_grads, distrib_optimizer
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.utils import StragglerDetector

from megatron.moevement import pretrain_gpt
from megatron.moevement.state import frozen, iteration_state
from moevement_ext import faults
from moevement_ext.protect import planner
from tests.stand_ins import grouped_linear
from tests.stand_ins.fused_adam import FusedAdam
from tests.stand_ins.random_states import GeneratorsTracker


def norm_as_tensor() -> None:
    """With Transformer Engine 2.14 and later the gradient norm stays on the device."""

    def scale(chunk_size: int, overflow: Any, tensors: list, coefficient: Any) -> None:
        for source, target in zip(*tensors, strict=True):
            target.copy_(source * coefficient)

    clip_grads.multi_tensor_scale_tensor_impl = scale


def fused_adam(kind: type[FusedAdam] = FusedAdam) -> None:
    """The optimizer of Transformer Engine, and the norm as a tensor."""
    norm_as_tensor()
    upstream.Adam, upstream.USING_PYTORCH_OPTIMIZER = kind, False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def transformer_engine() -> None:
    """Its optimizer and its experts. These cannot be written to dense checkpoints."""
    fused_adam()
    backends.LocalSpecProvider.grouped_mlp_modules = lambda *_: grouped_linear.experts()


def generators_tracked() -> None:
    """States of random numbers are generators, as in Transformer Engine's tracker."""
    random.CudaRNGStatesTracker = GeneratorsTracker


def generators_not_restored() -> None:
    """They draw on from wherever they are."""
    generators_tracked()
    iteration_state._restored = lambda present, state: present


def random_numbers_of_each_rank() -> None:
    """Data-parallel ranks drop out by other random numbers each."""
    train = training.train

    @wraps(train)
    def seeded(*args: Any, **settings: Any) -> Any:
        seed = 100 + int(os.environ['RANK'])
        tracker = random.get_cuda_rng_tracker()
        state = torch.Generator().manual_seed(seed).get_state()
        tracker.set_states(dict.fromkeys(tracker.get_states(), state))
        torch.manual_seed(seed)
        return train(*args, **settings)

    training.train = seeded


def delayed_gradients() -> None:
    """Experts compute the gradients of their weights later; upstream's parser wants the rest."""
    transformer_engine()
    _with_setting('delay_wgrad_compute')


def dies_within_a_layer() -> None:
    """When shared experts overlap with the exchange."""
    _dies_in(SharedExpertMLP, 'pre_forward_comm')


def dies_in_a_report_of_stragglers() -> None:
    """The others may have made theirs, or wait in it."""
    _dies_in(StragglerDetector, 'report')


def _dies_in(owner: type, name: str) -> None:
    """Rank 1 in iteration 8 or after it, first attempt."""
    if (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) != ('1', '0'):
        return
    begin = getattr(owner, name)

    def begin_or_die(*args: Any, **settings: Any) -> object:
        if faults._iteration >= 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(*args, **settings)

    setattr(owner, name, begin_or_die)


def different_lengths() -> None:
    """Every other sequence is cut in half."""
    _with_setting('variable_seq_lengths')
    get_batch = pretrain_gpt.get_batch
    parts = {'tokens': slice(1, None), 'labels': slice(-1)}

    def get_shorter(*args: Any) -> dict[str, Any]:
        batch = get_batch(*args)
        # The first stage has the tokens, the last the labels, which are one ahead.
        seen = next((batch[name][:, part] for name, part in parts.items()
                     if batch[name] is not None), None)  # fmt: skip
        if seen is not None and int(seen.sum()) % 2:
            half = (seen.shape[-1] + 1) // 2
            for name, held in batch.items():
                if held is not None:
                    batch[name] = held[..., :half, :half] if held.dim() == 4 else held[..., :half]
        return batch

    pretrain_gpt.get_batch = get_shorter


def _with_setting(name: str) -> None:
    """One that upstream's parser does not give here."""
    parse = pretrain_gpt.parse_and_validate_args

    def parse_with_setting(**given: Any) -> Any:
        args = parse(**given)
        setattr(args, name, True)
        return args

    pretrain_gpt.parse_and_validate_args = parse_with_setting


def delayed_gradients_of_frozen_asked_for() -> None:
    """A replay computes later also what was not put aside."""
    delayed_gradients()
    frozen._without_delayed_gradients = lambda model: nullcontext()


def steps_of_groups_not_taken_away() -> None:
    """A survivor that replays from iteration 0 keeps the steps that it has counted."""
    transformer_engine()
    restore = iteration_state.restore

    def keeping(state: Any, counters: Any, optimizer: Any, scheduler: Any) -> None:
        counted = [group.get('step') for group in optimizer.param_groups]
        restore(state, counters, optimizer, scheduler)
        for group, step, saved in zip(
            optimizer.param_groups, counted, state.group_steps, strict=True
        ):
            if saved is None and step is not None:
                group['step'] = step

    iteration_state.restore = keeping


def experts_in_reverse() -> None:
    """The first expert of each layer is captured last, whatever is popular when."""
    transformer_engine()
    in_order = planner.Planner._ordered

    def number(name: str) -> int:
        found = re.search(r'expert(\d+)$', name)
        return int(found[1]) if found else 1 << 30

    def reversed_order(members: Any, popularity: Any) -> list[str]:
        names = in_order(members, {})
        tied = {name for member in members for name in member.tied}
        return sorted(names, key=lambda name: (name not in tied, -number(name)))

    planner.Planner._ordered = staticmethod(reversed_order)


def experts_frozen_one_by_one() -> None:
    """Also those that a grouped linear layer computes together, by the word of the first."""
    experts_in_reverse()
    frozen._computed_together = lambda operators: (
        (frozenset([operator.name]), list(operator.parameters.values()))
        for operator in operators.values()
    )
