# SPDX-License-Identifier: Apache-2.0
"""SHA-256 digests of the training state of all ranks in one file, see `tools.compare_digests`."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from moevement_ext.capture.layout import OperatorSlices
from moevement_ext.config import ConfigurationError
from moevement_ext.events import probe


def write_digest(path: str, iteration: int, entries: dict[str, str]) -> None:
    """Gather the digests of all ranks and write them as JSON on rank 0. Collective.

    Creates the file's folder. `entries` are the digests of this rank, by name.
    """
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, entries)
    if torch.distributed.get_rank() != 0:
        return
    by_rank = {str(rank): found for rank, found in enumerate(ranks)}
    total = digest_of_bytes(msgspec.json.encode(by_rank, order='deterministic'))
    report = {'digest': total, 'iteration': iteration, 'ranks': by_rank}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(target.suffix + '.partial')
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    partial.rename(target)


def refuse_unwritable(path: str) -> None:
    """Raise `ConfigurationError` unless the file of `--sparse-ckpt-digest` can be written.

    Creates no file or folder, as another job may be writing there.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError('it is a directory')
        probe(target.parent)
    except OSError as error:
        raise ConfigurationError(
            f'--sparse-ckpt-digest {path}: digests cannot be written there: {error}. '
            'Give a file that this user can write, or leave the flag out.'
        ) from error


def digest_of_slices(slices: Mapping[str, OperatorSlices]) -> dict[str, str]:
    """Return the digests of all captured tensors of this rank, by part and name."""
    return {
        f'{item.part}/{item.tensor}': digest_of_tensor(item.source)
        for operator in slices.values()
        for item in (*operator.full, *operator.always)
    }


def digest_of_tensor(tensor: torch.Tensor) -> str:
    """Return the SHA-256 digest of a tensor's elements in row-major order."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return digest_of_bytes(flat.view(torch.uint8).numpy().tobytes())


def digest_of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
