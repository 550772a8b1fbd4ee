# SPDX-License-Identifier: Apache-2.0
"""One run of W&B for all processes of a job: upstream begins one without an id in each."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

from megatron.moevement.facts import UpstreamArguments
from megatron.moevement.seams import patches
from moevement_ext.logger import logger_of

logger = logger_of(__name__)

_RUN, _RESUME = 'WANDB_RUN_ID', 'WANDB_RESUME'


def keep() -> None:
    """Let the processes of a job, and its later starts, go on in one run of W&B.

    Call before upstream's parser, which begins the run. The id is in a file beside W&B's data until
    the job has finished; `WANDB_RUN_ID` of the user comes first.
    """
    patches.wrap('megatron.training.global_vars:_set_wandb_writer', _go_on)


def _go_on(original: Callable[..., None], args: UpstreamArguments) -> None:
    file = _file(args)
    if file is not None:
        os.environ.setdefault(_RESUME, 'allow')
    if file is not None and _RUN not in os.environ:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            run = file.read_text('ascii') if file.exists() else ''
            if not run:
                file.write_text(run := uuid4().hex, 'ascii')
            os.environ[_RUN] = run
        except (OSError, UnicodeError) as error:  # the tracker is not worth the job
            logger.warning('W&B begins another run after a failure: %s', error)
    original(args)


def forget(args: UpstreamArguments) -> None:
    """Let the next job begin another run of W&B, as this one has finished."""
    file = _file(args)
    if file is not None:
        with suppress(OSError):
            file.unlink()


def _file(args: UpstreamArguments) -> Path | None:
    """File with the id of the run of W&B; None where upstream begins no run."""
    folder = args.wandb_save_dir or (args.save and f'{args.save}/wandb')
    if not args.wandb_project or args.rank != args.world_size - 1 or not folder:
        return None
    return Path(folder) / f'sparse-ckpt-{quote(args.wandb_exp_name, safe="")}.id'
