# SPDX-License-Identifier: Apache-2.0
"""Answers and refusals of programs are those that were recorded; figures to nine digits.

After an intended change: `python -m tests.unit.tools.test_recorded_answers`, and read the
difference; commands after it are added. Known vectors are in the tests of each module.
"""

import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from moevement_ext.command import PROGRAMS

ROOT = Path(__file__).resolve().parents[3]
RECORDED = Path(__file__).with_name('recorded_answers.jsonl')
_MODEL = {
    'name': 'm', 'layers': 4, 'hidden_size': 256, 'attention_heads': 4, 'vocab_size': 512,
    'ffn_hidden_size': 1024, 'experts': 8, 'top_k': 2, 'expert_hidden_size': 256,
}  # fmt: skip
_JOB = {
    'model': _MODEL, 'layout': {'ranks': 16, 'pipeline': 2, 'expert': 2},
    'batch': {'sequence_length': 256, 'micro_batch_size': 1, 'global_batch_size': 64},
}  # fmt: skip
_PROFILE = json.loads((ROOT / 'docs/assets/simulate-profile.json').read_text('utf-8'))
FILES = {
    'job.json': _JOB,
    'no-layers.json': {**_JOB, 'model': {**_MODEL, 'layers': 0}},
    'unknown-field.json': {**_JOB, 'model': {**_MODEL, 'nope': 0}},
    'three-stages.json': {**_JOB, 'layout': {'ranks': 16, 'pipeline': 3}},
    'no-gpus.json': {'name': 'c', 'gpus_per_node': 0},
    'slow.json': {**_PROFILE, 'iteration_s': -1.0},
    'twice.json': {**_PROFILE, 'operators': _PROFILE['operators'][:1] * 2},
    'heavy.json': {**_PROFILE, 'operators': [{'name': 'a', 'full_bytes': 1, 'weight_bytes': 2}]},
    'no-columns.csv': 'a,b\n1,2\n',
}
"""What the commands read, besides `docs`."""
JOB = (
    '--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16 '
    '--max-position-embeddings 64 --micro-batch-size 1 --distributed-backend gloo --sparse-ckpt'
)
"""In a command `JOB` stands for these."""


@contextlib.contextmanager
def reader() -> Any:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path('docs').symlink_to(ROOT / 'docs')
        for name, content in FILES.items():
            text = content if isinstance(content, str) else json.dumps(content)
            Path(name).write_text(text, 'utf-8')
        yield


def answer(command: str) -> Any:
    """JSON, the last line of a text, or a status and its reason; of `check` how all lines begin."""
    tool, *argv = shlex.split(command.replace(' JOB', f' {JOB}'))
    main = import_module(PROGRAMS[tool][0]).main
    inherited = {name: os.environ.get(name, '') for name in ('HOME', 'PATH')}
    wide = mock.patch.dict(os.environ, {**inherited, 'COLUMNS': '200'}, clear=True)
    out, errors = io.StringIO(), io.StringIO()
    with reader(), wide, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            status = main(argv)
        except SystemExit as refused:
            status = refused.code
    if tool == 'check':
        *lines, last = f'{errors.getvalue()}{out.getvalue()}'.splitlines()
        return [status, '\n'.join([*(line[:60] for line in lines), f'{last[:60]} {last[-14:]}'])]
    if status:
        return [status, errors.getvalue().strip()]
    if '--json' in argv:
        return json.loads(out.getvalue())
    return out.getvalue().strip().splitlines()[-1]


def rounded(value: Any) -> Any:
    """Without wording and host memory, and with the number of names in the place of a list."""
    match value:
        case float():
            return float(f'{value:.9g}')
        case dict():
            kept = (key for key in value if key != 'warnings' and not key.startswith('host_memory'))
            return {key: rounded(value[key]) for key in kept}
        case [int(), str()]:
            return value
        case [str(), *_]:
            return len(value)
        case list():
            return [rounded(item) for item in value]
    return value


def recorded() -> dict[str, Any]:
    lines = map(json.loads, RECORDED.read_text('utf-8').splitlines())
    return {line['command']: line['answer'] for line in lines}


@pytest.mark.parametrize('command', recorded())
def test_answer_is_the_recorded_one(command: str) -> None:
    assert rounded(answer(command)) == recorded()[command]


if __name__ == '__main__':
    asked = [*recorded(), *sys.argv[1:]]
    again = [{'command': one, 'answer': rounded(answer(one))} for one in asked]
    RECORDED.write_text(''.join(json.dumps(one) + '\n' for one in again), 'utf-8')
