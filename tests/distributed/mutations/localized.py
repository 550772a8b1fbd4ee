# SPDX-License-Identifier: Apache-2.0
"""Ways to break localized recovery, one step each. Every one must turn the bits red."""

import gc
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training import get_args

from examples import small_gpt
from megatron.moevement import attachment, pretrain_gpt
from megatron.moevement.job import megatron_trainer, session
from megatron.moevement.seams import data_position, p2p
from megatron.moevement.state import broken_iteration, global_scalars, training_state
from moevement_ext.recover import conversion, stage_replay, verification


def data_not_moved_back() -> None:
    """A stage that replays goes on reading where it was."""
    data_position.UpstreamData.move_training = lambda *args: None


def recorded_norm_of_catch_up_wrong() -> None:
    """The clip factor of replayed iterations is that of a small gradient."""
    entry = stage_replay.StageReplay._entry

    def small(self, iteration):
        found = entry(self, iteration)
        found.grad_norms[:] = [norm / 1e3 for norm in found.grad_norms]
        return found

    stage_replay.StageReplay._entry = small


def metrics_of_a_replay_are_kept() -> None:
    """What routers sum up for the log in a replay counts for the iteration after it."""

    @contextmanager
    def replaying(self):
        with self.operators.frozen.replaying():
            yield

    megatron_trainer.MegatronTrainer.replaying = replaying


def log_of_neighbour_changed() -> None:
    """The first tensor of every iteration is not the one that was sent."""
    take = p2p.BoundaryCommunicator._take

    def scaled(self, direction):
        found = take(self, direction)
        return (found.detach() * 2).requires_grad_() if self._sequence[direction] == 1 else found

    p2p.BoundaryCommunicator._take = scaled


def iteration_state_not_rolled_back() -> None:
    """Survivors run the iteration again with the random numbers where they were cut off."""
    training_state.TrainingState.restore = lambda *args: None


def tokens_of_last_stage_not_replayed() -> None:
    """A first stage that replays alone divides its gradients by its own count of tokens."""
    original = global_scalars.ScalarRecorder.replaying

    def without(self, scalars):
        kept = global_scalars.GlobalScalars(scalars.grad_norms, scalars.overflows)
        return original(self, kept)

    global_scalars.ScalarRecorder.replaying = without


def own_data_not_moved_back() -> None:
    """The same, of a loop that is not upstream's."""
    move = attachment.ReplayableData.move_training

    def only_at_start(self, consumed_samples):
        if self.training is None:
            move(self, consumed_samples)

    attachment.ReplayableData.move_training = only_at_start


def scheduler_counts_iterations() -> None:
    """A loop moves its scheduler by one per iteration."""
    step = OptimizerParamScheduler.step
    OptimizerParamScheduler.step = lambda self, increment: step(self, min(increment, 1))


def optimizer_steps_twice() -> None:
    """A loop updates twice per iteration."""
    train_step = small_gpt.train_step

    def twice(built, *args, **schedule):
        result = train_step(built, *args, **schedule)
        built[1].step()
        return result

    small_gpt.train_step = twice


def slow_set_up_of_new_worker() -> None:
    """Not broken, but slow: longer than the time after which a worker counts as hung."""
    if os.environ['TORCHELASTIC_RESTART_COUNT'] != '0':
        set_up = session.Session.set_up

        def slow(self, *args):
            time.sleep(10.0)
            return set_up(self, *args)

        session.Session.set_up = slow


def one_bit_wrong_in_the_replay() -> None:
    """A chip that corrupts: one bit of a master weight is wrong, in a new process."""
    if os.environ['TORCHELASTIC_RESTART_COUNT'] != '0':
        _one_bit_wrong(once=False)


def one_bit_wrong_in_the_first_replay_of_rank_3() -> None:
    """A chip that corrupts once: that of the first process in its place."""
    if (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('3', '1'):
        _one_bit_wrong(once=True)


def one_bit_wrong_on_rank_0() -> None:
    """In each start of the whole job."""
    if os.environ['RANK'] == '0':
        _one_bit_wrong(once=False)


def _one_bit_wrong(once: bool) -> None:
    run = conversion.Conversion.run

    def run_with_a_wrong_bit(self, trainer, verification):
        run(self, trainer, verification)
        if once:
            conversion.Conversion.run = run
        name, state = max((one.name, one) for one in trainer.operators.states.values())
        state.master().view(torch.int32)[0] ^= 1 << 20
        print(f'wrong bit in {name}')

    conversion.Conversion.run = run_with_a_wrong_bit


def one_bit_wrong_after_the_last_capture() -> None:
    """A replay goes wrong where no captured state is left to compare it with, in a new process."""
    if os.environ.get('TORCHELASTIC_RESTART_COUNT') == '0':
        return
    check = verification.Verification._check_state

    def check_and_spoil(self, iteration):
        was_last = iteration == max(self._expected, default=-1)
        check(self, iteration)
        if was_last:
            key = max(key for key in self._sources if key.part in ('master', 'weight'))
            for other, source in self._sources.items():
                if (other.operator, other.tensor) == key[:2]:
                    source.view(-1).view(torch.uint8)[-1] ^= 1
            print(f'wrong bit in {key.operator} after iteration {iteration}')

    verification.Verification._check_state = check_and_spoil


def norm_of_detached_heads_wrong() -> None:
    """Layers that predict more tokens, and are clipped on their own, are clipped too much."""
    replaying = global_scalars.ScalarRecorder.replaying

    def replaying_large(self, scalars):
        first, *others = scalars.grad_norms
        norms = [first, *(norm * 1e3 for norm in others)]
        changed = global_scalars.GlobalScalars(norms, scalars.overflows, scalars.num_tokens)
        return replaying(self, changed)

    global_scalars.ScalarRecorder.replaying = replaying_large


def collector_comes_in_iteration_10() -> None:
    """By itself in the middle of that iteration, as it may at any moment, and never before.

    What is left to it is the context in which no gradients are reduced: an error may hold it in a
    cycle with the frames of an iteration that it has cut off.
    """
    gc.disable()
    forward_step, no_sync = pretrain_gpt.forward_step, DistributedDataParallel.no_sync

    def no_sync_in_a_cycle(chunk):
        context = no_sync(chunk)
        context.itself = context
        return context

    def collect_and_forward(*args, **settings):
        if get_args().curr_iteration == 9:
            gc.collect()
        return forward_step(*args, **settings)

    pretrain_gpt.forward_step = collect_and_forward
    DistributedDataParallel.no_sync = no_sync_in_a_cycle


def what_was_cut_off_is_left_to_the_collector() -> None:
    """An iteration that was cut off is gone when the collector comes by itself."""
    broken_iteration.gc = SimpleNamespace(collect=lambda: None)
    collector_comes_in_iteration_10()
