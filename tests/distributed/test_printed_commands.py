# SPDX-License-Identifier: Apache-2.0
"""Commands of documents and `--help` are run as printed; the last line of output is compared.

Commands run in a copy of the checkout's layout that has the files they name. Placeholders are
filled in: flags of a small model for `<flags>`, and what `...` omits. Long commands get an
additional flag that shortens them.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.distributed.harness.cluster import ROOT
from tests.support.printed_commands import printed
from tests.unit.tools.runs import localized_run, write
from tests.unit.tools.samples import CONVERTED, iteration_line, slot_line
from tools.lab import models
from tools.lab.figures import write_json
from tools.simulate.profile import derive

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

_TABLE = r'[└─┴┘]+'
_JSON = r'[\]}]'
_PYTHON = r'(\.venv/bin/)?python -m '
_LAUNCH = rf'.*{_PYTHON}moevement_ext\.launch\.command_line '
RUNS = {
    r'scripts/demo\.sh': r'demo: bit_identical=true .*',
    rf'{_PYTHON}tools\.chaos --faults 20 --seed 1$': r'chaos: faults=20 .* bit_identical=true .*',
    rf'{_PYTHON}tools\.chaos --help': r'--elastic .*',
    rf'{_LAUNCH}.* examples/': r'\[launcher.*',
    rf'{_PYTHON}tools\.drill ': r'drill passed, all bits are equal: .*',
    rf'{_PYTHON}moevement_ext\.launch\.torchrun --nproc-per-node 8 ': r'.*',
    rf'{_PYTHON}tools\.check ': r'protected: yes; localized: yes: a failure is recovered only .*',
    rf'{_PYTHON}tools\.compare --quick': r'.*',
    rf'{_PYTHON}tools\.compare_digests ': r'equal: 1 digests of 1 ranks after iteration 4',
    rf'{_PYTHON}tools\.plan ':
        rf'{_TABLE}|{_JSON}|Not part of a plan: .*|Warning: .*|--.*\.|',
    rf'{_PYTHON}tools\.prepare_data (?!.*GPT2)': r'flags for the trainer: --data-path .*',
    rf'{_PYTHON}tools\.report ': r'report\.html',
    rf'{_PYTHON}tools\.simulate(\.| )paper': rf'{_JSON}|.*Figures and text: \d+ of \d+\.',
    rf'{_PYTHON}tools\.simulate (?!paper)': _TABLE,
    rf'{_PYTHON}tools\.status ': r'.* localized .*',
    rf'{_PYTHON}tools\.windows (list|prune) DIR': r'no windows in DIR|.* 0 files, .*',
    rf'{_PYTHON}tools\.bench (?!overhead .*300$)\w+': r'.*',
    r'moevement --help': r'moevement <program> --help: its flags',
}  # fmt: skip
"""Commands, and what their last line is."""

NOT_HERE = r'.*(runs/tutorial/|"\$memory"| --against )'
"""Commands of the tutorial, which `tests/cluster` runs, and one that needs another checkout."""

_SHORTER = {
    'tools.bench regroup': '--cycles 20 --warm-up 5',
    'tools.bench overhead': '--rounds 1 --iterations 8 --warm-up 2',
    'tools.bench recovery': '--rounds 1',
    'tools.bench spare-node': '--rounds 1 --gib 0.1',
    'tools.compare': '--rows none,localized --iterations 32 --interval 4',
    'tools.drill': '--first 6 --second 12 --iterations 16',
}
"""Flags that a long one gets besides."""
_LEFT_OUT = {
    'tools.simulate': {
        'profile': 'docs/assets/simulate-profile.json', 'systems': 'gemini,ours', 'mtbf': '600',
    },
    'tools.plan': {'model': 'deepseek-moe', 'mfu': '0.3'},
    'tools.check': {},
}  # fmt: skip
_SHAPE = (
    '--num-attention-heads 32 --seq-length 4096 --vocab-size 32000 --num-experts 8 '
    '--moe-router-topk 2 --global-batch-size 128 --micro-batch-size 1 '
    '--max-position-embeddings 4096 --disable-gloo-process-groups --bf16 '
    '--use-distributed-optimizer --expert-model-parallel-size 8'
)


COMMANDS_THAT_RUN = [
    one
    for one in sorted(printed())
    if any(re.match(row, one) for row in RUNS) and not re.match(NOT_HERE, one)
]


@pytest.fixture(scope='module')
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """This one, and the files that a reader has."""
    folder = tmp_path_factory.mktemp('reader')
    for entry in ROOT.iterdir():
        if entry.name not in ('runs', 'data', 'docs'):
            (folder / entry.name).symlink_to(entry)
    for name in ('data', 'books', 'my_texts', 'DIR', 'runs'):
        (folder / name).mkdir()
    shutil.copytree(ROOT / 'docs', folder / 'docs')  # some files are read, and some written anew
    _write_inputs(folder)
    yield folder


def _write_inputs(folder: Path) -> None:
    write(folder / 'runs' / 'events', localized_run())
    (folder / 'EVENTS').symlink_to('runs/events')
    assets = folder / 'docs' / 'assets'
    write_json(folder / 'run.json', derive(folder / 'runs' / 'events', {}))
    for name in ('failures.csv', 'FILE'):
        (folder / name).write_bytes((assets / 'simulate-trace.csv').read_bytes())
    for name in ('A', 'B', 'a.json', 'b.json'):
        digest = {'digest': 'x', 'iteration': 4, 'ranks': {'0': {'parameter/a': 'y'}}}
        (folder / name).write_bytes(msgspec.json.encode(digest))
    (folder / 'job.json').write_text(_DESCRIPTION)
    for name in ('plain.log', 'sparse.log'):
        lines = [iteration_line(n, n) + slot_line(100) for n in range(1, 5)]
        again = [CONVERTED, *(iteration_line(n, 5 + n) for n in range(4, 7))]
        (folder / name).write_text(''.join([*lines, *(again if name == 'sparse.log' else ())]))
    for name in ('books/one.txt', 'my_texts/one.txt', 'notes.txt'):
        (folder / name).write_text('Some words. ' * 10_000)


_DESCRIPTION = """{
  "model": {"name": "m", "layers": 4, "hidden_size": 256, "attention_heads": 4, "vocab_size": 512,
            "ffn_hidden_size": 1024, "experts": 8, "top_k": 2, "expert_hidden_size": 256},
  "layout": {"ranks": 16, "pipeline": 2, "expert": 2},
  "batch": {"sequence_length": 256, "micro_batch_size": 1, "global_batch_size": 64}
}"""


def complete(command: str, flags: str) -> str:
    """With what a reader puts in."""
    given = f'--num-layers 32 --hidden-size 4096 {_SHAPE}' if 'tools.plan' in command else flags
    command = re.sub(r'<[^>]*flags[^>]*>', given, re.sub(r'[\[\]]', '', command))
    module = next((one for one in (*_SHORTER, *_LEFT_OUT) if f'-m {one} ' in f'{command} '), None)
    if ' ...' in command:
        # Failures come from a trace or from the number of GPUs, too.
        known = re.findall(r'--(?:over )?([\w-]+)', command)
        known += ['mtbf'] if {'trace', 'gpus'} & set(known) else []
        more = [
            f'--{name} {value}'
            for name, value in _LEFT_OUT[str(module)].items()
            if name not in known
        ]
        command = command.replace(' ...', f' {_SHAPE if " -- " in command else " ".join(more)}')
    if module in _SHORTER:
        own, end, after = command.partition(' -- ')
        command = f'{own} {_SHORTER[module]}{end}{after}'
    return command


@pytest.fixture(scope='module')
def flags(checkout: Path) -> str:
    """Of a model that 8 ranks can train on a CPU."""
    data = models.prepare_text(checkout / 'data', 1, quiet=True)
    model = models.ToyModel(hidden=64, heads=4, sequence=64, experts=4)
    own = (
        '--num-layers 8 --untie-embeddings-and-output-weights --bf16 --micro-batch-size 1 '
        '--global-batch-size 16 --lr 1e-3 --min-lr 1e-4 --lr-warmup-iters 2 --train-iters 12'
    )
    found = [*model.flags(), *models.TRAINING, *own.split(), *models.TEXT, *models.NO_EVALUATION,
             *models.data_flags(data)]  # fmt: skip
    return shlex.join(found)


@pytest.mark.parametrize(
    'command', sorted({one.removeprefix('.venv/bin/'): one for one in COMMANDS_THAT_RUN}.values())
)
def test_printed_command_does_what_its_page_says(command: str, checkout: Path, flags: str) -> None:
    (expected,) = [last for row, last in RUNS.items() if re.match(row, command)]
    path = f'{ROOT / ".venv" / "bin"}{os.pathsep}{Path(sys.executable).parent}'
    done = subprocess.run(
        ['bash', '-c', complete(command, flags)],
        cwd=checkout,
        env={
            **os.environ, 'CUDA_VISIBLE_DEVICES': '', 'PATH': f'{path}{os.pathsep}/usr/bin:/bin',
            'OMP_NUM_THREADS': '1', 'GLOO_SOCKET_IFNAME': 'lo', 'n': '3',
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, f'{command}: {done.stdout[-3000:]}'
    last = [line for line in done.stdout.splitlines() if line.strip()][-1:]
    assert re.fullmatch(expected, last[0].strip() if last else ''), f'{command}: {last}'
