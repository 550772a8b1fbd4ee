# SPDX-License-Identifier: Apache-2.0
"""A restart uses the dense checkpoint that upstream would load, if all ranks can read it."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from megatron.training import checkpointing
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from megatron.moevement.seams import dense_tier, patches
from megatron.moevement.seams.dense_tier import DenseTier, dense_iteration
from tests.unit.megatron.moevement.job.test_identity import parsed

ARGUMENTS = 'megatron.training.checkpointing:load_args_from_checkpoint'
TRACKER = 'latest_checkpointed_iteration.txt'
NOT_KEPT = '--non-persistent-ckpt-type global --non-persistent-save-interval 5'.split()


def checkpoint(folder: Path, iteration: int) -> Path:
    """Make the newest checkpoint of a folder."""
    named = folder / f'iter_{iteration:07d}'
    named.mkdir(parents=True)
    (folder / TRACKER).write_text(str(iteration))
    return named


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A folder whose newest dense checkpoint is of iteration 10."""
    checkpoint(tmp_path, 10)
    return tmp_path


def among(*others: DenseTier) -> Callable[[str, bytes], list[bytes]]:
    return lambda name, own: [own, *map(msgspec.msgpack.encode, others)]


def found(args: Namespace, *others: DenseTier) -> int:
    """The iteration that rank 0 finds, with the reports of the other ranks."""
    args.rank = 0
    return dense_iteration(args, among(*others))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ('flags', 'iteration'), [('', 10), ('--ckpt-step 4', 4), ('--finetune', 0)]
)
def test_flags_select_the_dense_checkpoint(flags: str, iteration: int, dense: Path) -> None:
    (dense / 'iter_0000004').mkdir()
    assert found(parsed('--load', str(dense), *flags.split())) == iteration


@pytest.mark.parametrize(('not_kept', 'newest'), [(15, 15), (5, 10)])
@pytest.mark.parametrize('elsewhere', [False, True])
def test_newer_non_persistent_checkpoint_is_chosen(
    not_kept: int, newest: int, elsewhere: bool, dense: Path, tmp_path: Path
) -> None:
    folder = tmp_path / ('elsewhere' if elsewhere else 'non_persistent')
    checkpoint(folder, not_kept)
    where = ['--non-persistent-global-ckpt-dir', str(folder)] if elsewhere else []
    args = parsed('--load', str(dense), *NOT_KEPT, *where)
    assert found(args) == newest
    (dense / TRACKER).unlink()
    assert found(args) == not_kept


@pytest.mark.parametrize(('kept', 'not_kept'), [(10, 5), (5, 10), (10, 10)])
def test_loss_of_an_older_checkpoint_does_not_hide_the_newer_one(
    kept: int, not_kept: int, tmp_path: Path
) -> None:
    """Upstream reads only the newer one; of two equally new ones, the non-persistent one."""
    folders = {tmp_path: kept, tmp_path / 'non_persistent': not_kept}
    of = {folder: checkpoint(folder, iteration) for folder, iteration in folders.items()}
    older = tmp_path if kept <= not_kept else tmp_path / 'non_persistent'
    of[older].rmdir()
    args = parsed('--load', str(tmp_path), *NOT_KEPT)
    assert found(args) == 10
    (newer,) = set(of) - {older}
    of[newer].rmdir()
    assert found(args) == -1


def test_unreadable_tracker_file_of_either_folder_counts_as_no_checkpoint(dense: Path) -> None:
    args = parsed('--load', str(dense), *NOT_KEPT)
    checkpoint(dense / 'non_persistent', 15)
    (dense / TRACKER).write_text('')
    assert found(args) == -1
    (dense / TRACKER).write_text('10')
    (dense / 'non_persistent' / TRACKER).write_text('')
    assert found(args) == -1


def test_requested_step_needs_no_tracker_file(
    dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (dense / TRACKER).unlink()
    assert found(parsed('--load', str(dense), '--ckpt-step', '10')) == 10
    assert found(parsed('--load', str(dense), '--ckpt-step', '4')) == -1
    assert 'iter_0000004, which --ckpt-step 4 names, does not exist' in caplog.text


def test_missing_dense_checkpoint_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert found(parsed()) == -1
    assert found(parsed('--load', str(tmp_path / 'new')), DenseTier(-1)) == -1
    assert found(parsed('--finetune', '--load', str(tmp_path / 'new'))) == -1
    assert caplog.text == ''


@pytest.mark.parametrize('text', [b'', b'ten', b'-3', b'11', b'\0\0', b'\xff'])
def test_invalid_tracker_file_is_reported(
    text: bytes, dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (dense / TRACKER).write_bytes(text)
    assert found(parsed('--load', str(dense)), DenseTier(10)) == -1
    assert '--load is used only if' in caplog.text and TRACKER in caplog.text
    assert 'as 1 of 2 ranks cannot read it: rank 0: ' in caplog.text


def test_rank_without_the_dense_checkpoint_is_named(
    dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = parsed('--load', str(dense))
    assert found(args, DenseTier(10), DenseTier(8)) == 10
    assert found(args, DenseTier(10), DenseTier(-1)) == -1
    assert f'rank 2: no dense checkpoint in {dense}' in caplog.text


def test_truncated_checkpoint_file_is_named(dense: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = dense / 'iter_0000010'
    save({'weight': torch.ones(1000)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    (folder / 'metadata.json').write_text('{}')
    args = parsed('--load', str(dense))
    assert found(args) == 10 and 'left out' not in caplog.text
    (part,) = folder.glob('*.distcp')
    with open(part, 'r+b') as file:
        file.truncate(100)
    assert found(args) == -1
    assert f'{part} is truncated' in caplog.text
    (folder / '.metadata').write_bytes(b'x')
    assert found(args) == -1
    assert f'{folder} cannot be read' in caplog.text


def test_flags_apply_if_the_checkpoint_has_no_arguments(
    dense: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Upstream would exit with status 0, which a launcher takes for success."""
    (dense / TRACKER).write_text('')
    args = parsed('--load', str(dense), '--use-checkpoint-args', '--num-layers', '4')
    with patches.wrapped(ARGUMENTS, dense_tier._or_as_given):
        assert checkpointing.load_args_from_checkpoint(args) is args
    assert args.num_layers == 4 and 'flags count as given' in caplog.text
