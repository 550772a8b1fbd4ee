# SPDX-License-Identifier: Apache-2.0
"""Turns the user's flags of `pretrain_gpt.py` into those of a short job without lasting output."""

from collections.abc import Sequence
from pathlib import Path

from tools.lab.errors import LabError
from tools.lab.trainer_flags import groups, value_of

EVENTS = 'events'
DIGEST = 'digest.json'
_LEFT_OUT = {
    # The drill neither loads checkpoints of the real run nor writes any beside them.
    '--save', '--load', '--save-interval', '--save-retain-interval',
    '--non-persistent-save-interval',
    '--non-persistent-ckpt-type', '--non-persistent-global-ckpt-dir',
    '--non-persistent-local-ckpt-dir', '--pretrained-checkpoint', '--ckpt-step', '--finetune',
    '--async-save', '--exit-interval', '--exit-duration-in-mins', '--exit-signal-handler',
    '--tensorboard-dir', '--wandb-project', '--wandb-exp-name', '--wandb-save-dir',
    '--sparse-ckpt', '--sparse-ckpt-run-id', '--sparse-ckpt-events', '--sparse-ckpt-metrics',
    '--sparse-ckpt-digest', '--log-interval', '--train-iters',
    '--sparse-ckpt-store',  # it serves one run; each job of the drill uses its launcher's store
}  # fmt: skip


def drill_flags(given: Sequence[str], iterations: int, run_id: str, folder: Path) -> list[str]:
    """Flags of one job of the drill.

    Args:
        given: the user's flags.
        iterations: number of iterations to train; schedules stay those of the whole run.
        run_id: run id of the job.
        folder: folder for events, and for the digest of the final state.

    Raises:
        LabError: a flag excludes a drill; the message names the flag.
    """
    if '--train-samples' in _names(given):
        raise LabError('--train-samples: give a drill --train-iters, and schedules in iterations')
    if '--sparse-ckpt-verify' in _names(given) and value_of(given, '--sparse-ckpt-verify') == 'off':
        raise LabError('--sparse-ckpt-verify off: a drill is to verify; leave it out')
    flags = _without(given, _LEFT_OUT)
    whole = value_of(given, '--train-iters')
    if whole is not None and '--lr-decay-iters' not in _names(given):
        flags += ['--lr-decay-iters', whole]
    flags += ['--train-iters', str(iterations), '--log-interval', '1']
    return [
        *flags, '--sparse-ckpt', '--sparse-ckpt-run-id', run_id,
        '--sparse-ckpt-events', str(folder / EVENTS), '--sparse-ckpt-digest', str(folder / DIGEST),
    ]  # fmt: skip


def _without(flags: Sequence[str], names: set[str]) -> list[str]:
    kept: list[str] = []
    for flag, values in groups(flags):
        if flag not in names:
            kept += [flag, *values] if flag else values
    return kept


def _names(flags: Sequence[str]) -> set[str]:
    return {flag for flag, _ in groups(flags)}
