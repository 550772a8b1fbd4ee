# SPDX-License-Identifier: Apache-2.0
"""What a restart would go on from is what upstream would load."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.core.optimizer.optimizer import (  # noqa: E402
    MTP_GRAD_NORM_GROUP,
    ChainedOptimizer,
)
from megatron.training import training  # noqa: E402

from megatron.moevement.seams import upstream  # noqa: E402
from tests.unit.megatron.moevement.job.test_identity import parsed  # noqa: E402


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A folder whose newest dense checkpoint is of iteration 10."""
    (tmp_path / 'latest_checkpointed_iteration.txt').write_text('10')
    return tmp_path


@pytest.mark.parametrize(
    ('flags', 'iteration'), [('', 10), ('--ckpt-step 4', 4), ('--finetune', 0)]
)
def test_dense_checkpoint_is_the_one_that_flags_ask_for(
    flags: str, iteration: int, dense: Path
) -> None:
    args = parsed('--load', str(dense), *flags.split())
    assert upstream.dense_checkpoint_iteration(args) == iteration


NOT_KEPT = '--non-persistent-ckpt-type global --non-persistent-save-interval 5'.split()


@pytest.mark.parametrize(('not_kept', 'newest'), [(15, 15), (5, 10)])
@pytest.mark.parametrize('elsewhere', [False, True])
def test_a_dense_checkpoint_that_is_not_kept_counts_if_it_is_newer(
    not_kept: int, newest: int, elsewhere: bool, dense: Path, tmp_path: Path
) -> None:
    folder = tmp_path / ('elsewhere' if elsewhere else 'non_persistent')
    folder.mkdir()
    (folder / 'latest_checkpointed_iteration.txt').write_text(str(not_kept))
    where = ['--non-persistent-global-ckpt-dir', str(folder)] if elsewhere else []
    args = parsed('--load', str(dense), *NOT_KEPT, *where)
    assert upstream.dense_checkpoint_iteration(args) == newest
    (dense / 'latest_checkpointed_iteration.txt').unlink()
    assert upstream.dense_checkpoint_iteration(args) == not_kept


def test_without_a_dense_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert upstream.dense_checkpoint_iteration(parsed()) == -1
    assert upstream.dense_checkpoint_iteration(parsed('--load', str(tmp_path / 'new'))) == -1
    finetuned = parsed('--finetune', '--load', str(tmp_path / 'new'))
    assert upstream.dense_checkpoint_iteration(finetuned) == -1


@pytest.mark.parametrize(
    ('layers', 'detached', 'own'), [(None, False, False), (2, False, False), (2, True, True)]
)
def test_every_rank_knows_of_norms_of_their_own(
    layers: int | None, detached: bool, own: bool
) -> None:
    """Also one that has no such parameters: all compute every norm together."""
    optimizer = ChainedOptimizer([])
    config = SimpleNamespace(mtp_num_layers=layers, mtp_detach_heads=detached)
    upstream.fill_first_step_caches(optimizer, config)
    assert optimizer.has_grad_norm_group(MTP_GRAD_NORM_GROUP) is own


@pytest.mark.parametrize('iteration', [0, 3, 5, 6, 7, 9, 11])
@pytest.mark.parametrize('transitions', [None, [], [6], [3, 9]])
def test_data_of_a_phase_go_on_where_upstream_opens_them(
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
    assert upstream.consumed_of_the_phase(args) == opened[0]
