# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's `pretrain` with what the `--sparse-ckpt*` flags ask for around it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from megatron.moevement import upstream
from megatron.moevement.arguments import config_from_args
from megatron.moevement.digest import state_digest, write_digest
from megatron.moevement.session import Session
from moevement_ext.rendezvous import launcher_store, meet


def run_with_sparse_checkpointing(train: Callable[..., Any], args: Any) -> None:
    """Call `train`; without `--sparse-ckpt` nothing stands around it.

    Args:
        train: upstream's `pretrain`, ready to be called; takes `store`.
        args: upstream's parsed arguments.
    """
    if args.sparse_ckpt_digest is not None:
        upstream.wrap('train', _digesting(args))
    if not args.sparse_ckpt:
        train()
        return
    session = Session(args, config_from_args(args))
    session.install()
    train(store=_fresh_store(args))
    torch.distributed.barrier()  # nobody gives up what another may still need to recover
    session.close()


def _fresh_store(args: Any) -> torch.distributed.Store | None:
    """A store without the keys of an earlier life of the job, where the launcher's outlives it."""
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    store = launcher_store(timeout)
    return None if store is None else meet(store, args.rank, args.world_size, timeout)


def _digesting(args: Any) -> Callable[..., Any]:
    def train(
        original: Any, forward: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        result = original(forward, model, optimizer, scheduler, *rest, **kwargs)
        entries = state_digest(model, optimizer, scheduler, args)
        write_digest(args.sparse_ckpt_digest, result[0], entries)
        return result

    return train
