# SPDX-License-Identifier: Apache-2.0
"""The tutorial, as a reader goes through it: its commands, in one shell, and what it says of them.

It runs in a copy of the checkout, so that it finds nothing there that it has not made itself.
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
    """What stands between fences."""

    language: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r'^```(\w+)\n(.*?)^```', page, re.M | re.S)]


def program(commands: list[str], cleanup: str) -> str:
    """All commands in one shell, which ends with the first that fails; what is left goes then."""
    return '\n'.join(
        ['set -e', f"trap '{cleanup}' EXIT", *commands, f'trap - EXIT\n{cleanup}\necho {END}']
    )


def unseen(expected: list[str], output: str) -> list[str]:
    """Lines of the page, in which ... stands for anything, that do not follow one another."""
    lines = iter([' '.join(line.split()) for line in output.splitlines()])
    patterns = [' '.join(line.split()).replace('[', '[[]').replace('...', '*') for line in expected]
    return [one for one in patterns if not any(fnmatch.fnmatchcase(line, one) for line in lines)]


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """Without anything that git ignores, but with the environment that setup_env.sh has made."""
    require()
    copy = tmp_path / 'c'  # a path to a socket in it must be short
    shutil.copytree(ROOT, copy, ignore=IGNORED)
    (copy / '.venv').symlink_to((ROOT / '.venv').resolve())
    yield copy
    shutil.rmtree(copy)


@pytest.mark.thorough
def test_the_tutorial_is_true(checkout: Path) -> None:
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
    assert unseen(expected, done.stdout) == [], done.stdout[-8000:]


def test_a_page_that_says_something_else_is_noticed() -> None:
    output = 'rank 1 of  5\n[launcher] all is well\nrank 2 of 5\n'
    assert unseen(['rank ... of 5', '[launcher] all ... well'], output) == []
    assert unseen(['[launcher] all is well', 'rank 1 of 5'], output) == ['rank 1 of 5']
    assert unseen(['all is well'], output) != []


def test_the_first_command_that_fails_ends_all_and_nothing_is_left() -> None:
    shell = program(['echo one', 'false', 'echo two'], cleanup='echo gone\n')
    done = subprocess.run(['bash', '-c', shell], capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == 'one\ngone\n'
