# SPDX-License-Identifier: Apache-2.0
"""The tutorial: its commands run in one shell, and its text matches their output.

It runs in a copy of the checkout, so that it finds no files of earlier runs.
"""

import fnmatch
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cluster.slurm import INSTALLATION, require
from tests.distributed.harness.cluster import ROOT

pytestmark = pytest.mark.timeout(1800)
PAGE = ROOT / 'docs' / 'tutorial.md'
IGNORED = shutil.ignore_patterns('.*', 'runs', 'data', 'checkpoints', 'logs', '__pycache__')
END = 'the tutorial has ended'


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r'^```(\w+)\n(.*?)^```', page, re.M | re.S)]


def program(commands: list[str], cleanup: str) -> str:
    """All commands in one shell that ends with the first failure and then cleans up."""
    return '\n'.join(
        ['set -e', f"trap '{cleanup}' EXIT", *commands, f'trap - EXIT\n{cleanup}\necho {END}']
    )


def missing_lines(expected: list[str], output: str) -> list[str]:
    """Expected lines that the output does not have in this order; `...` matches anything."""
    lines = iter([' '.join(line.split()) for line in output.splitlines()])
    patterns = [' '.join(line.split()).replace('[', '[[]').replace('...', '*') for line in expected]
    return [one for one in patterns if not any(fnmatch.fnmatchcase(line, one) for line in lines)]


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """The checkout without ignored files, but with the environment of setup_env.sh."""
    require()
    copy = tmp_path / 'c'  # socket paths in it must be short
    shutil.copytree(ROOT, copy, ignore=IGNORED)
    (copy / '.venv').symlink_to((ROOT / '.venv').resolve())
    yield copy
    shutil.rmtree(copy)


@pytest.mark.thorough
def test_tutorial_shows_the_real_output(checkout: Path) -> None:
    found = blocks(PAGE.read_text('utf-8'))
    installation, *commands = [block.text for block in found if block.language == 'bash']
    assert installation.splitlines() == [' '.join(command) for command in INSTALLATION]
    said = ''.join(block.text for block in found if block.language == 'text')
    expected = said.splitlines()
    assert len(commands) > 8 and len(expected) > 15

    environment = {name: value for name, value in os.environ.items() if name != 'SLURM_CONF'}
    done = subprocess.run(
        ['bash', '-c', program(commands[:-1], cleanup=commands[-1])],
        cwd=checkout,
        env={**environment, 'PYTHONPATH': str(checkout)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.endswith(f'{END}\n'), done.stdout[-8000:]
    assert missing_lines(expected, done.stdout) == [], done.stdout[-8000:]


def test_wrong_output_on_the_page_is_detected() -> None:
    output = 'rank 1 of  5\n[launcher] all is well\nrank 2 of 5\n'
    assert missing_lines(['rank ... of 5', '[launcher] all ... well'], output) == []
    assert missing_lines(['[launcher] all is well', 'rank 1 of 5'], output) == ['rank 1 of 5']
    assert missing_lines(['all is well'], output) != []


def test_first_failing_command_ends_the_shell_after_cleanup() -> None:
    shell = program(['echo one', 'false', 'echo two'], cleanup='echo gone\n')
    done = subprocess.run(['bash', '-c', shell], capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == 'one\ngone\n'
