# SPDX-License-Identifier: Apache-2.0
"""Compares two checkpoints of upstream, tensor by tensor and object by object, as a program."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from megatron.core.dist_checkpointing import load, load_common_state_dict
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

SAID = 'differs: '
_OF_THE_PROCESS = ('args', 'rerun_state_machine', 'common_state')


def main() -> None:
    """Print a list of the names of all that differs between the checkpoints of two folders."""
    torch.distributed.init_process_group(
        'gloo', rank=0, world_size=1, store=torch.distributed.HashStore()
    )
    left, right = (_content(Path(folder)) for folder in sys.argv[1:3])
    differing = [
        name
        for name in sorted(left.keys() | right.keys())
        if not _same(left.get(name), right.get(name))
    ]
    assert len(left) > 50  # tensors, and entries of optimizer and schedule
    print(SAID + msgspec.json.encode(differing).decode())


def _content(folder: Path) -> dict[str, object]:
    sharded = load_sharded_metadata(str(folder))
    stored = load(sharded, str(folder), validate_access_integrity=False)
    found = {**stored, **load_common_state_dict(str(folder))}
    return dict(
        leaf
        for key, one in found.items()
        if not key.startswith(_OF_THE_PROCESS)
        for leaf in _leaves(one, key)
    )


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f'{path}/{key}')
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _leaves(one, f'{path}/{number}')
    else:
        yield path, value


def _same(left: object, right: object) -> bool:
    if torch.is_tensor(left) and torch.is_tensor(right):
        return left.dtype == right.dtype and torch.equal(left, right)
    return type(left) is type(right) and str(left) == str(right)
