# SPDX-License-Identifier: Apache-2.0
"""Ways to break recovery, one step each. Every one must turn the comparison of bits red."""

from collections.abc import Callable

import msgspec

from megatron.moevement.state import dense_random, global_scalars, iteration_state, training_state
from moevement_ext.memory.window import slot as slot_module
from moevement_ext.memory.window import twin
from moevement_ext.memory.window.slot import Record


def leave_out(without: Callable[[Record], bool]) -> None:
    """Restore no record of a slot for which `without` is true."""
    restore = training_state.restore_slices

    def restore_others(records, read, known):
        restore([record for record in records if not without(record)], read, known)

    training_state.restore_slices = restore_others


def moments_not_restored() -> None:
    """Adam's moments keep what a fresh process has: zeros."""
    leave_out(lambda record: record.part.startswith('exp_avg'))


def step_not_restored() -> None:
    """Adam's step counts start again."""
    leave_out(lambda record: record.part == 'step')


def router_bias_not_restored() -> None:
    """Router bias and token counters start again."""
    leave_out(lambda record: record.part == 'buffer')


def rng_not_restored() -> None:
    """Random number generators stay as seeded."""
    iteration_state.restore_rng = lambda state: None


def random_numbers_of_a_dense_checkpoint_not_restored() -> None:
    """Each rank keeps what upstream has given it."""
    dense_random.DenseRandom._read = lambda self, folder: None


def scaler_not_restored() -> None:
    """The loss scale and its trackers start again."""
    iteration_state._restore_scaler = lambda scaler, state: None


def norm_not_replayed() -> None:
    """The clip factor of a replay comes from the gradients of the active operators only."""
    original = global_scalars.ScalarRecorder.replaying

    def computed(self, scalars):
        return original(self, global_scalars.GlobalScalars([0.0] * 8, scalars.overflows))

    global_scalars.ScalarRecorder.replaying = computed


def overflow_not_replayed() -> None:
    """A replay takes every step, also those that were skipped."""
    original = global_scalars.ScalarRecorder.replaying

    def never(self, scalars):
        norms = scalars.grad_norms or [1.0] * 8
        return original(self, global_scalars.GlobalScalars(norms, [False] * 8))

    global_scalars.ScalarRecorder.replaying = never


def frozen_weights_from_wrong_slot() -> None:
    """Frozen operators keep the compute weights of slot 0 through the whole conversion."""
    seen = []
    leave_out(lambda record: record.part == 'weight' and bool(seen))
    restore = training_state.restore_slices

    def restore_and_note(*args):
        restore(*args)
        seen.append(True)

    training_state.restore_slices = restore_and_note


def scheduler_not_restored() -> None:
    """Learning rate and weight decay start again."""
    original = iteration_state.restore

    def restore(state, args, optimizer, scheduler):
        steps = scheduler.num_steps
        original(state, args, optimizer, scheduler)
        scheduler.num_steps = steps
        scheduler.step(increment=0)

    iteration_state.restore = restore


def dense_load_without_renewal() -> None:
    """Windows are captured from what was there before the late load of a dense checkpoint."""
    renew = training_state.TrainingState.renew

    def once(self):
        if not hasattr(self, 'slices'):
            renew(self)

    training_state.TrainingState.renew = once


def part_of_the_twin() -> None:
    """A window that comes from a twin has random numbers and buffers of the twin, not its own."""

    def pieces(self, slot):
        owner = self._headers[slot].owner
        header = msgspec.structs.replace(self._base.header(slot), owner=owner)
        yield memoryview(slot_module.encode_frame(header))
        yield memoryview(self._base.payload(slot))

    twin.TwinWindow.pieces = pieces
