# SPDX-License-Identifier: Apache-2.0
"""Makes workers record the state of every operator and the tokens of every expert."""

import json
from pathlib import Path

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron.moevement.state.training_state import TrainingState
from moevement_ext.job.digest_file import digest_of_tensor
from moevement_ext.protect.checkpointer import SparseCheckpointer
from tests.distributed.mutations.whole_job import leave_out


def states_are_noted() -> None:
    """In a file of the rank beside its events.

    Lines with the iteration that it `captures` or `loads`, and states of operators; and with an
    iteration that was `routed`, and tokens by layer and expert, summed from the routing maps.
    """
    begin, load, forward = SparseCheckpointer.begin, TrainingState.load, TopKRouter.forward
    routed: dict[int, torch.Tensor] = {}

    def capturing(self, iteration, *given):
        tokens = [routed[layer].tolist() for layer in sorted(routed)]
        _note(self._identity.rank, {'routed': iteration, 'tokens': tokens})
        routed.clear()
        _note(self._identity.rank, {'captures': iteration, 'states': _states(self._operators)})
        begin(self, iteration, *given)

    def loading(self, header, payload, context):
        load(self, header, payload, context)
        routed.clear()
        _note(header.owner, {'loads': header.iteration, 'states': _states(self.slices)})

    def routing(self, *args, **kwargs):
        probs, routing_map = forward(self, *args, **kwargs)
        if torch.is_grad_enabled():
            tokens = routing_map.sum(dim=0)
            routed[self.layer_number] = routed.get(self.layer_number, 0) + tokens
        return probs, routing_map

    SparseCheckpointer.begin, TrainingState.load = capturing, loading
    TopKRouter.forward = routing


def step_is_forgotten() -> None:
    """Step counts stay those of before."""
    states_are_noted()
    leave_out(lambda record: record.part == 'step')


def _states(operators) -> dict:
    return {
        name: [digest_of_tensor(item.source) for item in held.full]
        for name, held in operators.items()
    }


def _note(rank, line) -> None:
    from megatron.training import get_args

    with (Path(get_args().sparse_ckpt_events) / f'rank{rank}.notes').open('a') as file:
        file.write(json.dumps(line) + '\n')
