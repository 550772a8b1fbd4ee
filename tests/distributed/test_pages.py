# SPDX-License-Identifier: Apache-2.0
"""The programs that the pages show, run as a reader would run them."""

import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from moevement_ext.config import SparseCheckpointConfig
from tests.distributed.harness.cluster import ROOT
from tests.distributed.harness.commands import run_to_end

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]
API = (ROOT / 'docs' / 'api.md').read_text('utf-8')
README = (ROOT / 'README.md').read_text('utf-8')
MAIN = "if __name__ == '__main__':\n"
ITERATIONS = 12
# What the snippet trains, and what a machine without a GPU can.
LARGE = 'train_iters=1000, seq_length=4096, micro_batch_size=1, global_batch_size=512'
SMALL = (
    f'train_iters={ITERATIONS}, seq_length=SEQUENCE, micro_batch_size=1, '
    "global_batch_size=MICRO_BATCHES, backend='gloo'"
)
# The names that the snippet of README leaves to its reader, by those of the complete program.
READERS_OWN = """
model_config, optimizer_config, ddp_config, data = model, optimizer, ddp, batches
_build, _train_step = build, train_step


def build():
    return _build(model_config, optimizer_config, ddp_config)


def train_step(data, **schedule):
    return _train_step((model, optimizer, scheduler), data, **schedule)
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf'^```{language}\n(.*?)^```', page, re.M | re.S)


def program_of_readme() -> str:
    """Its snippet, with all that it does not say taken from the program of api.md."""
    (snippet,), (complete, _) = blocks(README, 'python'), blocks(API, 'python')
    configurations = re.search(r'^def main\(\):\n(.*?)^    plan = ', complete, re.M | re.S)
    assert configurations is not None and LARGE in snippet
    functions = complete.removesuffix(f'{MAIN}    main()\n')
    assert functions != complete
    snippet = snippet.replace(LARGE, SMALL) + "print('trained', job.iteration)\n"
    own = textwrap.dedent(configurations[1]) + READERS_OWN
    return f'{functions}{own}\n\n{MAIN}{textwrap.indent(snippet, "    ")}'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """This one, and what a reader has saved in it."""
    for entry in ROOT.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    (tmp_path / 'loop.py').write_text(blocks(API, 'python')[0])
    (tmp_path / 'readme.py').write_text(program_of_readme())
    return tmp_path


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """What a program that fails leaves in the directory of all runs of this user goes."""
    directory = Path(SparseCheckpointConfig().dir)
    before = set(directory.glob('*'))
    yield
    for run in set(directory.glob('*')) - before:
        shutil.rmtree(run, ignore_errors=True)


def run(command: str, checkout: Path) -> str:
    done = run_to_end(
        ['bash', '-c', f'exec 2>&1\n{command}'],
        timeout_s=500,
        cwd=checkout,
        env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''},
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def test_program_of_api_has_the_same_bits_after_a_loss(checkout: Path) -> None:
    """By the digest tool: also generators that the program does not use are seeded."""
    trains = '        job.train(loop, batches)\n'
    program = blocks(API, 'python')[0]
    assert trains in program
    digests = "        job.write_digest(Path(os.environ['DIGEST']))\n"
    with_digest = program.replace(trains, trains + digests)
    with_digest = with_digest.replace('import os\n', 'import os\nfrom pathlib import Path\n')
    (checkout / 'loop.py').write_text(with_digest.replace('train_iters=100', 'train_iters=24'))
    cluster = '.venv/bin/moevement launch --nodes 3 --spares 1'
    run(f'DIGEST=undisturbed.json {cluster} -- loop.py', checkout)
    run(f'DIGEST=killed.json {cluster} --kill 1@12 -- loop.py', checkout)
    compare = '.venv/bin/python -m tools.compare_digests undisturbed.json killed.json'
    assert 'equal' in run(compare, checkout)


def test_loop_of_readme_trains(checkout: Path) -> None:
    command = '.venv/bin/moevement launch --nodes 2 -- readme.py'
    assert run(command, checkout).count(f'trained {ITERATIONS}\n') == 2
