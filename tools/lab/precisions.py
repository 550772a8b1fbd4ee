# SPDX-License-Identifier: Apache-2.0
"""Flags of the five configurations of the paper's Table 7, and the programs to run them.

They need Transformer Engine; on a CPU, a tool may run them on stand-ins with the same rules.
"""

import importlib.util

from .launch import PROGRAM, ROOT

STAND_INS = 'tests/stand_ins/program.py'
"""A program equal to `PROGRAM`, with the stand-ins."""
BASE = '--use-distributed-optimizer'
_AWARE = '--use-precision-aware-optimizer'
_IN_FP8 = '--bf16 --fp8-format hybrid --fp8-param-gather'
_C3 = f'{_IN_FP8} --fp8-recipe delayed {_AWARE} --main-params-dtype fp16'
_MOMENTS = '--exp-avg-dtype fp8 --exp-avg-sq-dtype fp16'

FLAGS = {
    'bf16': f'{BASE} --bf16',
    'c1': f'{BASE} --fp16 --initial-loss-scale 4096 --accumulate-allreduce-grads-in-fp32 {_AWARE} '
    '--main-params-dtype fp16 --exp-avg-dtype fp16 --exp-avg-sq-dtype fp16',
    'c2': f'{BASE} {_IN_FP8} --fp8-recipe tensorwise',
    'c3': f'{BASE} {_C3}',
    'c4': f'{BASE} {_C3} {_MOMENTS}',
    'c5': f'{BASE} {_C3} --sparse-ckpt-fp8-masters {_MOMENTS}',
}
"""Flags of Megatron, by name of the precision as in `moevement plan --precision`."""
NATIVE = {'bf16': FLAGS['bf16'], 'fp32': ''}
"""Flags for the values of `models.native_precision`. In fp32 Megatron cannot load the checkpoints
of its distributed optimizer."""
ENGINE = ('--transformer-impl', 'transformer_engine')


def program(stand_ins: bool) -> str:
    """Path of the program for narrow precisions.

    Raises:
        ValueError: Transformer Engine is required but not installed, or the stand-ins are missing.
    """
    if stand_ins:
        if not (ROOT / STAND_INS).is_file():
            raise ValueError(f'--stand-ins: there is no {STAND_INS}: run it in a checkout')
        return STAND_INS
    if importlib.util.find_spec('transformer_engine') is None:
        raise ValueError(
            'Transformer Engine is not installed: install it, or give --stand-ins for a CPU'
        )
    return PROGRAM
