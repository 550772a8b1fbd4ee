# SPDX-License-Identifier: Apache-2.0
"""Records which samples the data loader of each rank gives to each iteration."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.training import get_args

from megatron.moevement import pretrain_gpt
from megatron.moevement.job import session

_INDEX = 'index of the sample'


def record() -> None:
    """Write them into a file of this process, one line for each micro-batch."""
    item, get_batch, step = GPTDataset.__getitem__, pretrain_gpt.get_batch, session.Session.step
    began = time.time_ns()
    iteration: list[int] = []

    def with_index(self: Any, idx: Any) -> Any:
        return {**item(self, idx), _INDEX: torch.tensor(-1 if idx is None else int(idx))}

    def stepped(self: Any, train_step: Any, committed: int) -> Any:
        def noting(**keywords: Any) -> Any:
            iteration[:] = [keywords['iteration']]
            return train_step(**keywords)

        return step(self, noting, committed)

    def noted(data: Iterator[dict[str, Any]], *args: Any) -> Any:
        return get_batch(_Noting(data, began, iteration), *args)

    GPTDataset.__getitem__ = with_index
    session.Session.step = stepped  # type: ignore[method-assign]
    pretrain_gpt.get_batch = noted


class _Noting:
    def __init__(
        self, data: Iterator[dict[str, Any]], began: int, iteration: Sequence[int]
    ) -> None:
        self._data = data
        self._began = began
        self._iteration = iteration

    def __next__(self) -> dict[str, Any]:
        batch = next(self._data)
        args = get_args()
        now = self._iteration[0] if self._iteration else args.curr_iteration
        name = f'samples-{self._began}-{mpu.get_data_parallel_rank()}.jsonl'
        with (Path(args.sparse_ckpt_digest).parent / name).open('a') as file:
            file.write(json.dumps([now, batch[_INDEX].tolist()]) + '\n')
        return batch
