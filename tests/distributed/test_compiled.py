# SPDX-License-Identifier: Apache-2.0
"""Jobs as a user runs them: what upstream compiles is compiled and fused, with dropout in it."""

import os
from pathlib import Path

import pytest

from tests.unit.memory.samples import tmpfs_directory
from tools.gpu_check import one_rank
from tools.gpu_check.settings import Settings
from tools.gpu_check.training import Kill, Trials, compare
from tools.lab.evidence import Tier
from tools.lab.launch import _FUSIONS, ROOT

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

SOON = """
import sys
if 'pretrain_gpt.py' in ' '.join(sys.orig_argv):
    import torch._dynamo.config
    torch._dynamo.config.recompile_limit = 2
"""
"""torch's own limit of variants, which larger models come to, is reached at once."""
FLAGS = '--attention-dropout 0.1 --hidden-dropout 0.1 --deterministic-mode'.split()


def test_a_replay_computes_the_bits_of_compiled_functions(tmp_path: Path) -> None:
    """A new process has compiled them for other inputs, and in another order."""
    with tmpfs_directory() as memory:
        settings = Settings(tmp_path, memory, gpu=False)
        flags = [flag for flag in one_rank._flags(settings) if flag not in _FUSIONS]
        (tmp_path / 'sitecustomize.py').write_text(SOON)
        modules = os.pathsep.join([str(tmp_path), str(ROOT)])
        compiled = {
            'PYTHONPATH': modules,
            'TORCHDYNAMO_DISABLE': '0',
            'TORCHINDUCTOR_CACHE_DIR': str(tmp_path / 'cache'),
        }
        trials = Trials(settings, tmp_path, [*flags, *FLAGS], nodes=1, window=4, variables=compiled)
        undisturbed = trials.protected('undisturbed')
        assert list((tmp_path / 'cache').rglob('*.so')), 'nothing was compiled'
        killed = trials.protected('killed', Kill(rank=0, after=11))
    assert compare(undisturbed, killed, 'killed', 'the same without the kill') == []
    assert killed.recovery is not None and killed.recovery.tier is Tier.WHOLE_JOB
