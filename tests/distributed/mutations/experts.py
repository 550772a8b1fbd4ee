# SPDX-License-Identifier: Apache-2.0
"""Workers that note the state of every operator, as they capture and as they load it."""

import json
from pathlib import Path

from megatron.moevement.state.slices import SlotLoader
from megatron.moevement.state.training_state import TrainingState
from moevement_ext.job.digest_file import digest_of_tensor
from moevement_ext.protect.checkpointer import SparseCheckpointer


def states_are_noted() -> None:
    """In a file of the rank beside its events: iteration that it `captures` or `loads`, states."""
    begin, load = SparseCheckpointer.begin, TrainingState.load

    def capturing(self, iteration, state):
        _note(self._identity.rank, {'captures': iteration}, self._operators)
        begin(self, iteration, state)

    def loading(self, header, payload, context):
        load(self, header, payload, context)
        _note(header.owner, {'loads': header.iteration}, self.slices)

    SparseCheckpointer.begin, TrainingState.load = capturing, loading


def step_is_forgotten() -> None:
    """Step counts stay those of before."""
    states_are_noted()
    SlotLoader.restore_step = lambda self, record, content: None


def _note(rank, line, operators) -> None:
    from megatron.training import get_args

    states = {
        name: [digest_of_tensor(item.source) for item in held.full]
        for name, held in operators.items()
    }
    with (Path(get_args().sparse_ckpt_events) / f'rank{rank}.states').open('a') as file:
        file.write(json.dumps({**line, 'states': states}) + '\n')
