# SPDX-License-Identifier: Apache-2.0
"""Queries of the adapter to upstream's trainer, and groups of a process that joins a job."""

from argparse import Namespace
from types import SimpleNamespace

import megatron.core.optimizer as optimizers
import pytest
import torch
from megatron.core.optimizer.optimizer import MTP_GRAD_NORM_GROUP, ChainedOptimizer
from megatron.training import training
from torch.distributed import HashStore

from megatron.moevement.seams import upstream
from megatron.moevement.seams.upstream import groups_of_all_ranks
from moevement_ext.membership.exchange import Exchange


@pytest.mark.parametrize(
    ('layers', 'detached', 'own'), [(None, False, False), (2, False, False), (2, True, True)]
)
def test_every_rank_registers_the_separate_gradient_norm(
    layers: int | None, detached: bool, own: bool
) -> None:
    """Even a rank without such parameters: all ranks compute every norm together."""
    optimizer = ChainedOptimizer([])
    config = SimpleNamespace(mtp_num_layers=layers, mtp_detach_heads=detached)
    upstream.fill_first_step_caches(optimizer, config)
    assert optimizer.has_grad_norm_group(MTP_GRAD_NORM_GROUP) is own


@pytest.mark.parametrize('off', [False, True])
def test_detector_of_stragglers_is_as_launched_again(
    off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator has switched it with a request to rank 0; a new process is as launched."""
    detector = training.stimer
    names = ('world', '_off', 'start', 'stop')
    before = {name: getattr(detector, name) for name in names}
    started, stopped = detector.start_method, detector.stop_method
    args = Namespace(disable_straggler_on_startup=off)
    monkeypatch.setattr(training, 'get_args', lambda: args)
    monkeypatch.setattr(detector, 'world', 2)
    monkeypatch.setattr(detector, '_off', not off)
    try:
        upstream.switch_detector_as_launched()
        assert detector._off is off
        unused = detector.null_method
        assert detector.start == (unused if off else started)
        assert detector.stop == (unused if off else stopped)
    finally:
        vars(detector).update(before)


@pytest.mark.parametrize('iteration', [0, 3, 5, 6, 7, 9, 11])
@pytest.mark.parametrize('transitions', [None, [], [6], [3, 9]])
def test_consumed_samples_of_a_phase_match_upstream(
    iteration: int, transitions: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def open_loader(dataset: object, consumed_samples: int) -> object:
        opened.append(consumed_samples)
        return iter(())

    args = Namespace(
        iteration=iteration,
        consumed_train_samples=4 * iteration,
        consumed_valid_samples=0,
        global_batch_size=4,
        train_samples=48,
        train_iters=12,
        phase_transition_iterations=transitions,
        perform_rl_step=False,
        skip_train=False,
        full_validation=False,
        multiple_validation_sets=False,
        eval_iters=0,
        eval_interval=100,
        start_eval_at_iter=None,
    )
    monkeypatch.setattr(training, 'get_args', lambda: args)
    monkeypatch.setattr(training.mpu, 'get_tensor_model_parallel_rank', lambda: 0)
    monkeypatch.setattr(training, 'build_pretraining_data_loader', open_loader)
    monkeypatch.setattr(torch.distributed, 'broadcast', lambda *_: None)
    datasets = None, None, None
    training.build_train_valid_test_data_loaders(lambda _: datasets)
    assert upstream.consumed_of_the_phase() == opened[0]


def _kinds(exchange: Exchange, experts: bool) -> list[tuple[bool, float, int]]:
    """For each group: expert flag, weight decay factor and number of parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    if experts:
        model[1].weight.allreduce = False
    config = optimizers.OptimizerConfig(lr=0.1)
    overrides = optimizers.get_standard_config_overrides(config)
    with groups_of_all_ranks(exchange):
        groups = optimizers._get_param_groups([model], config, overrides)
    return sorted(
        (group['is_expert_parallel'], group['wd_mult'], len(group['params'])) for group in groups
    )


@pytest.mark.usefixtures('one_rank')
def test_groups_of_other_ranks_exist_and_are_empty() -> None:
    archive = HashStore()
    assert _kinds(Exchange(archive), experts=True) == [
        (False, 0.0, 1),
        (False, 1.0, 1),
        (True, 1.0, 1),
    ]
    assert _kinds(Exchange(archive, joining=True), experts=False) == [
        (False, 0.0, 1),
        (False, 1.0, 2),
        (True, 1.0, 0),
    ]
    assert _kinds(Exchange(), experts=False) == [(False, 0.0, 1), (False, 1.0, 2)]
