# SPDX-License-Identifier: Apache-2.0
"""Permitted and refused uses of a custom loop; each runs in its own process."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()


from examples import small_gpt  # noqa: E402
from megatron.moevement import attachment  # noqa: E402
from megatron.moevement.job.declared import TrainingPlan, refuse_mixed_up_sends  # noqa: E402
from moevement_ext.config import ConfigurationError, SparseCheckpointConfig  # noqa: E402
from tests.unit.megatron.moevement.attached import OwnLoop, Raised, attached, batches, run  # noqa: E402
from tests.unit.memory.samples import tmpfs_directory  # noqa: E402

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tmpfs_directory() as path:
        yield path


def windows(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / 'memory').rglob('*.window'))


def left_early(directory: Path) -> int:
    with attached(directory) as own:
        own.train(stop_at=4)
        return own.job.iteration


def iterations_to_the_end(directory: Path) -> list[int]:
    """Iterations of a loop that continues from one that ended early."""
    seen = []
    with attached(directory) as own:

        def loop() -> None:
            while own.job.iteration < own.plan.train_iters:
                own.job.step(own.train_step)
                seen.append(own.job.iteration)

        own.job.train(loop, batches)
    return seen


def set_up_alone(directory: Path) -> int:
    with attached(directory) as own:
        return own.job.iteration


def test_loop_that_ends_early_resumes_from_its_windows(directory: Path) -> None:
    assert run(left_early, directory) == 4
    assert windows(directory) != []
    assert run(set_up_alone, directory) > 0
    assert windows(directory) != [], 'nothing was trained'
    assert run(iterations_to_the_end, directory)[0] > 2
    assert windows(directory) == []


def saves_a_checkpoint(directory: Path) -> None:
    """Run another job, which keeps no windows."""
    with attached(directory, iterations=5) as own:
        own.train()
        torch.save(dict(own.built[0][0].named_parameters()), directory / 'checkpoint')


def resumes_with_a_checkpoint(
    directory: Path, checkpoint: Path, iteration: int | None
) -> tuple[int, bool]:
    """The iteration that a job resumes from, and whether it has the checkpoint's weights."""
    loaded = torch.load(checkpoint)

    def load(chunks: list[Any], optimizer: Any, scheduler: Any) -> tuple[int, int]:
        for name, parameter in chunks[0].named_parameters():
            parameter.data.copy_(loaded[name])
        optimizer.reload_model_params()
        return 5, 20

    load_own = {'load_checkpoint': load, 'checkpoint_iteration': iteration}
    with attached(directory, load_own=load_own) as own:
        began, weights = own.job.iteration, dict(own.built[0][0].named_parameters())
        has_loaded = all(torch.equal(weights[name], loaded[name]) for name in loaded)
        own.train()
        return began, has_loaded


def test_newer_checkpoint_of_the_loop_is_preferred(directory: Path) -> None:
    other = directory / 'other'
    run(saves_a_checkpoint, other)
    for iteration, expected in ((5, (5, True)), (3, (2, False)), (None, (2, False))):
        run(left_early, directory)
        iterations_to_the_end = partial(
            resumes_with_a_checkpoint, checkpoint=other / 'checkpoint', iteration=iteration
        )
        assert run(iterations_to_the_end, directory) == expected, iteration


def ends_before_the_restore(directory: Path) -> None:
    """The loop ends before the step that would restore the state."""
    with attached(directory) as own:
        own.job.train(lambda: None, batches)
        (directory / 'saved').touch()


def test_loop_that_ends_before_its_state_is_restored_ends_the_program(directory: Path) -> None:
    """Later code, such as saving a checkpoint, must not find a partial state."""
    run(left_early, directory)
    kept = windows(directory)
    with pytest.raises(Raised, match='SystemExit: 0'):
        run(ends_before_the_restore, directory)
    assert not (directory / 'saved').exists()
    assert windows(directory) == kept
    assert run(iterations_to_the_end, directory)[0] > 2


def beyond_the_last(own: OwnLoop) -> None:
    own.job.train(lambda: [own.job.step(own.train_step) for _ in range(3)], batches)


def trained(own: OwnLoop) -> OwnLoop:
    own.train()
    return own


MISUSES: dict[str, tuple[dict[str, Any], Callable[[OwnLoop], object] | None, str]] = {
    'checkpoint without a loader': (
        {'load_own': {'checkpoint_iteration': 5}}, None, '=5 without load_checkpoint'
    ),
    'another checkpoint': (
        {'load_own': {'load_checkpoint': lambda *_: (4, 16), 'checkpoint_iteration': 5}},
        None, 'loaded iteration 4, .*_iteration=5',
    ),
    'connected by torch': (
        {'connect': lambda job: torch.distributed.init_process_group('gloo')},
        None, 'set_up .* after job.init_process_group',
    ),
    'digest of nothing': (
        {'connect': lambda job: job.write_digest(Path('digest'))},
        None, 'write_digest .* before job.set_up',
    ),
    'one model': (
        {'change': lambda model, *rest: (model[0], *rest)},
        None, r'build\(\) must return a list of model chunks',
    ),
    'no scheduler': (
        {'change': lambda model, optimizer, _: (model, optimizer)},
        None, r'build\(\) must return .* the scheduler',
    ),
    'set up twice': (
        {}, lambda own: own.job.set_up(lambda: own.built), 'set_up must be called once'
    ),
    'beyond the last': ({}, beyond_the_last, 'step.* iteration 2, the last .*train_iters'),
    'outside': ({}, lambda own: own.job.step(own.train_step), 'step.* outside of .*train'),
    'afterwards': (
        {}, lambda own: trained(own).job.step(own.train_step), 'step.* outside of .*train'
    ),
    'trained twice': ({}, lambda own: trained(own).train(), 'train.* second time'),
}  # fmt: skip


def misused(directory: Path, how: str) -> None:
    settings, use, _ = MISUSES[how]
    with attached(directory, iterations=2, **settings) as own:
        assert use is not None
        use(own)


@pytest.mark.parametrize('how', MISUSES)
def test_invalid_calls_are_refused(how: str, directory: Path) -> None:
    with pytest.raises(Raised, match=f'ConfigurationError: .*{MISUSES[how][2]}'):
        run(partial(misused, how=how), directory)


@pytest.mark.parametrize(
    ('field', 'value'),
    [('log_interval', 0), ('micro_batch_size', 0), ('seq_length', -1), ('backend', 'cpu:gloo')],
)
def test_invalid_training_plan_is_refused(field: str, value: object) -> None:
    settings = {'seq_length': 64, 'micro_batch_size': 2, 'global_batch_size': 4, field: value}
    with pytest.raises(ConfigurationError, match=f'TrainingPlan.{field} .*{value}.* must be'):
        TrainingPlan(train_iters=6, **settings)


@pytest.mark.parametrize(
    ('setting', 'ranks', 'said'),
    [
        # Upstream's schedules accept them.
        ({'virtual_pipeline_model_parallel_size': 2}, 2, 'two pipeline .* overlap_p2p_comm=True'),
        # Upstream's trainer records its graphs only after a recovery has replayed.
        ({'cuda_graph_impl': 'transformer_engine'}, 1, "set cuda_graph_impl='none'"),
    ],
)
def test_model_that_cannot_be_replayed_is_refused(
    setting: dict[str, Any], ranks: int, said: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('WORLD_SIZE', f'{ranks}')
    model, *others = small_gpt.configurations(ranks)
    vars(model).update(setting)
    plan = TrainingPlan(6, seq_length=64, micro_batch_size=2, global_batch_size=4, backend='gloo')
    sparse = SparseCheckpointConfig(dir=str(directory))
    with pytest.raises(ConfigurationError, match=said):
        attachment.attach(sparse, model, *others, plan).__enter__()
    model.overlap_p2p_comm, model.batch_p2p_comm = True, False
    refuse_mixed_up_sends(model)


def releases_a_failed_step(directory: Path) -> bool:
    with attached(directory) as own:
        made = []

        def train_step(data: object, **schedule: object) -> None:
            activations = torch.ones(1)
            made.append(weakref.ref(activations))
            raise ValueError('a bad batch')

        with suppress(ValueError):
            own.job.train(lambda: own.job.step(train_step), batches)
        gc.collect()
        return made[0]() is None


def test_interrupted_step_keeps_no_references(directory: Path) -> None:
    """Upstream's pending work would end in a later step, and activations take memory."""
    assert run(releases_a_failed_step, directory)


def with_other_schedule(directory: Path, change: dict[str, Any], runs: int = 1) -> None:
    """Train with a schedule that differs from the declared one."""
    from megatron.core import num_microbatches_calculator
    from megatron.core.pipeline_parallel import get_forward_backward_func

    with attached(directory) as own:
        if change.pop('reconfigure', False):
            num_microbatches_calculator.reconfigure_num_microbatches_calculator(0, None, 8, 2, 1)

        def train_step(data: object, **schedule: Any) -> None:
            chunks, optimizer, scheduler = own.built
            declared = {
                'num_microbatches': 2,
                'micro_batch_size': 2,
                'seq_length': small_gpt.SEQUENCE,
            }
            settings = {**declared, **schedule, **change}
            for _ in range(runs):
                get_forward_backward_func()(
                    forward_step_func=small_gpt.forward_step,
                    data_iterator=data,
                    model=chunks,
                    forward_only=False,
                    **settings,
                )
            optimizer.step()
            (directory / 'updated').touch()
            scheduler.step(increment=4)

        def loop() -> None:
            while own.job.iteration < own.plan.train_iters:
                own.job.step(train_step)

        own.job.train(loop, batches)


@pytest.mark.parametrize(
    ('change', 'runs', 'message'),
    [
        ({'num_microbatches': 1}, 1, 'ran 1 micro-batches of 2 .* has 2 of 2 .* change the plan'),
        ({'num_microbatches': 1}, 2, 'ran 1 micro-batches of 2 .* has 2 of 2 .* change the plan'),
        ({'micro_batch_size': 1}, 1, 'ran 2 micro-batches of 1 .* has 2 of 2 .* change the plan'),
        (
            {'seq_length': 33},
            1,
            'seq_length=33, .* TrainingPlan.seq_length 32; set that to the longest',
        ),
        ({'reconfigure': True}, 1, 'Megatron is set to 4; .* has 2 of 2 .* change the plan'),
        ({}, 2, 'ran a schedule twice'),
        ({'p2p_communicator': None}, 1, 'must pass on all keywords'),
    ],
)
def test_schedule_that_differs_from_the_plan_is_refused(
    change: dict[str, Any], runs: int, message: str, directory: Path
) -> None:
    with pytest.raises(Raised, match=f'ConfigurationError: .*{message}'):
        run(partial(with_other_schedule, change=change, runs=runs), directory)
    assert not (directory / 'updated').exists()


def takes_its_device(directory: Path) -> list[str]:
    from moevement_ext.job import own_device

    done: list[str] = []
    build = small_gpt.build
    own_device.take = lambda: done.append('device')

    def noted(*configurations: Any) -> Any:
        done.append('build')
        return build(*configurations)

    small_gpt.build = noted
    with attached(directory):
        return done


def test_device_is_set_before_the_model_is_built(directory: Path) -> None:
    assert run(takes_its_device, directory) == ['device', 'build']
