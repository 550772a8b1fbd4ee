# SPDX-License-Identifier: Apache-2.0
"""Answers of `plan` and `simulate` are those that were recorded, to nine digits.

After an intended change: `python -m tests.unit.tools.test_recorded_answers`, and read the
difference. Known vectors are in the tests of each module.
"""

import contextlib
import io
import json
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECORDED = Path(__file__).with_name('recorded_answers.jsonl')


def answer(command: str) -> Any:
    tool, *argv = shlex.split(command)
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(io.StringIO()) as out:
        assert import_module(f'tools.{tool}.__main__').main(argv) == 0
    return json.loads(out.getvalue())


def rounded(value: Any) -> Any:
    """Without wording and host memory, and with the number of names in the place of a list."""
    match value:
        case float():
            return float(f'{value:.9g}')
        case dict():
            kept = (key for key in value if key != 'warnings' and not key.startswith('host_memory'))
            return {key: rounded(value[key]) for key in kept}
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
    again = [{'command': one, 'answer': rounded(answer(one))} for one in recorded()]
    RECORDED.write_text(''.join(json.dumps(one) + '\n' for one in again), 'utf-8')
