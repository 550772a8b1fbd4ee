# SPDX-License-Identifier: Apache-2.0
"""Shared tools of probes inside a worker; results are written beside the digest."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.training import get_args

from megatron.moevement import pretrain_gpt
from megatron.moevement.job import session
from megatron.moevement.state.training_state import TrainingState


def report(name: str, content: Any) -> None:
    """Write `content` for the test that started this worker; see `read`."""
    args = get_args()
    path = Path(args.sparse_ckpt_digest).parent / f'{name}-rank{args.rank}.json'
    path.write_text(json.dumps(content))


def read(directory: Path, name: str, ranks: int) -> list[Any]:
    return [
        json.loads((directory / f'{name}-rank{rank}.json').read_text()) for rank in range(ranks)
    ]


def leave() -> None:
    """End all workers of the job here, with success."""
    torch.distributed.barrier()
    os._exit(0)


def after_set_up(look: Callable[[Any, TrainingState], None]) -> None:
    """Call `look` with the session and its training state after set-up, then end the job."""
    set_up = session.Session.set_up

    def looked_at(self: Any, *args: Any, **kwargs: Any) -> Any:
        set_up(self, *args, **kwargs)
        look(self, self.trainer.operators)
        leave()

    session.Session.set_up = looked_at  # type: ignore[method-assign]


def count_forward_passes() -> None:
    """Print, when training is over, how many micro-batches went forward through this stage."""
    forward = pretrain_gpt.forward_step
    train = session.Session.train
    passes = [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes[0] += 1
        return forward(*args, **kwargs)

    def trained(*args: Any, **kwargs: Any) -> Any:
        result = train(*args, **kwargs)
        print(f'forward passes: {passes[0]}', flush=True)
        return result

    pretrain_gpt.forward_step = counted
    session.Session.train = trained  # type: ignore[method-assign]
