# SPDX-License-Identifier: Apache-2.0
"""Jobs as a user runs them: what upstream compiles is compiled and fused, with dropout in it."""

import os
from pathlib import Path

import pytest

from megatron.moevement.seams.without_gpu import COMPILED
from moevement_ext.events import Recovered
from tests.gpu.jobs import four_rank, one_rank
from tests.gpu.jobs.findings import Settings
from tests.gpu.jobs.training import Kill, Trials, compare
from tests.unit.memory.samples import tmpfs_directory
from tools.lab import models
from tools.lab.evidence import Tier, kind_of
from tools.lab.job import Trained
from tools.lab.launch import ROOT
from tools.lab.presets import WORLD_SIZE, training_flags

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

SOON = """
import sys
if 'pretrain_gpt.py' in ' '.join(sys.orig_argv):
    import torch._dynamo.config
    torch._dynamo.config.recompile_limit = 2
"""
"""torch's own limit of variants, which larger models come to, is reached at once."""
OTHERS = """--num-layers 2 --moe-layer-freq [0,1] --ffn-hidden-size 96 --squared-relu --qk-layernorm
 --use-fused-weighted-squared-relu --moe-shared-expert-intermediate-size 64
 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
 --rampup-batch-size 8 8 64""".split()
"""Other compiled functions: a dense layer, shared experts, batches that grow, and recomputation."""
FLAGS = '--attention-dropout 0.1 --hidden-dropout 0.1 --deterministic-mode'.split()


def compiling(folder: Path) -> dict[str, str]:
    (folder / 'sitecustomize.py').write_text(SOON)
    return {
        'PYTHONPATH': os.pathsep.join([str(folder), str(ROOT)]),
        'TORCHDYNAMO_DISABLE': '0',
        'TORCHINDUCTOR_CACHE_DIR': str(folder / 'cache'),
    }


def as_users_run(folder: Path, memory: Path, flags: list[str], nodes: int, window: int) -> Trials:
    """Jobs with dynamo on and the fusions that run on a CPU at their defaults."""
    fused = [flag for flag in flags if flag not in COMPILED]
    settings = Settings(folder, memory, gpu=False)
    return Trials(settings, folder, [*fused, *FLAGS], nodes, window, variables=compiling(folder))


def compared(trials: Trials, folder: Path, kill: Kill) -> Trained:
    """A job with a kill, whose bits are those of the same without it."""
    undisturbed = trials.protected('undisturbed')
    assert list((folder / 'cache').rglob('*.so')), 'nothing was compiled'
    killed = trials.protected('killed', kill)
    assert compare(undisturbed, killed, 'killed') == []
    return killed


@pytest.mark.parametrize('others', [False, True])
def test_replay_matches_the_bits_of_compiled_functions(others: bool, tmp_path: Path) -> None:
    """A new process has compiled them for other inputs, and in another order."""
    with tmpfs_directory() as memory:
        flags = one_rank._flags(Settings(tmp_path, memory, gpu=False))
        if others:
            flags = [*(flag for flag in flags if flag != '--swiglu'), *OTHERS]
        trials = as_users_run(tmp_path, memory, flags, nodes=1, window=4)
        killed = compared(trials, tmp_path, Kill(rank=0, after=11))
    assert killed.recovery is not None and killed.recovery.tier is Tier.WHOLE_JOB


def test_localized_replay_matches_the_bits_of_compiled_functions(tmp_path: Path) -> None:
    """One process of the stage is new and compiles as it replays; its peer has compiled before."""
    data = models.prepare_text(tmp_path / 'data', megabytes=1)
    flags = training_flags(data, four_rank.ITERATIONS)
    with tmpfs_directory() as memory:
        trials = as_users_run(tmp_path, memory, flags, WORLD_SIZE, four_rank.WINDOW)
        killed = compared(trials, tmp_path, four_rank.KILL)
    assert four_rank.not_localized(killed) == []
    found = [event for event in kind_of(killed.events, Recovered) if event.replayed]
    assert sum(event.verified for event in found) and not any(event.differing for event in found)
    assert any(event.iterations for event in found), 'no loss was compared'
