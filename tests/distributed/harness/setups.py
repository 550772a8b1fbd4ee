# SPDX-License-Identifier: Apache-2.0
"""Flags of jobs: those that most tests share, and the tables of `setups.toml`."""

import tomllib
from pathlib import Path
from typing import Any

BF16 = '--bf16 --use-distributed-optimizer'
PP2 = '--pipeline-model-parallel-size 2'
EP2 = '--expert-model-parallel-size 2'
TP2 = '--tensor-model-parallel-size 2 --sequence-parallel'
PP_EP = f'{PP2} {EP2}'
UNTIED = '--untie-embeddings-and-output-weights'
TWO_STAGES = f'{BF16} {PP2} {UNTIED} --num-layers 2 --train-iters 12'.split()
"""For tests whose subject is not the model."""
_SHARED = {'BF16': BF16, 'PP2': PP2, 'EP2': EP2, 'TP2': TP2, 'PP_EP': PP_EP, 'UNTIED': UNTIED}
_TABLES = tomllib.loads(Path(__file__).parents[1].joinpath('setups.toml').read_text('utf-8'))


def setups(table: str, **names: str) -> dict[str, Any]:
    """What a table has for each case, with these and the shared names in braces filled in."""
    shared = _SHARED | _filled(_TABLES['names'], _SHARED)
    return {case: _filled(found, shared | names) for case, found in _TABLES[table].items()}


def _filled(found: Any, names: dict[str, str]) -> Any:
    if isinstance(found, dict):
        return {key: _filled(value, names) for key, value in found.items()}
    return ' '.join(found.format(**names).split()) if isinstance(found, str) else found
