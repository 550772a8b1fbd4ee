# SPDX-License-Identifier: Apache-2.0
"""Stage: runs the tests that need a GPU."""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from tools.gpu_check.report import Findings, Settings
from tools.lab.launch import ROOT

# CUDA_DEVICE_MAX_CONNECTIONS, with tensor parallelism and torch's default.
_CONNECTIONS = ('1', '8')
# Time limit of a test; each takes a few seconds.
_LONGEST_S = 100


def run(settings: Settings) -> Iterator[Findings]:
    """Run the tests once for each number of connections; without a GPU all are skipped."""
    folder = settings.folder('tests')
    left_out = deselected(torch.cuda.device_count(), _installed)
    yield Findings({'left_out': ' '.join(left_out) or 'none'}, [])
    for connections in _CONNECTIONS if settings.gpu else _CONNECTIONS[:1]:
        results = folder / f'connections-{connections}.xml'
        environment = {**os.environ, 'CUDA_DEVICE_MAX_CONNECTIONS': connections}
        arguments = command(_tests(left_out), results, left_out)
        code = subprocess.run(arguments, cwd=ROOT, env=environment).returncode
        found = counts(results.read_text('utf-8')) if results.exists() else {}
        not_run = not found.get('tests') or (settings.gpu and found['skipped'])
        problem = (
            f'CUDA_DEVICE_MAX_CONNECTIONS={connections}: pytest ended with exit status {code}: '
            f'{found or "no results"}'
        )
        figures = {f'{name}_{connections}': count for name, count in found.items()}
        yield Findings(figures, [problem] if code or not_run else [])


def _tests(left_out: Sequence[str]) -> list[Path]:
    """Tests that need a GPU, and tests of Transformer Engine's rules that run its kernels there."""
    rules = ROOT / 'tests' / 'transformer_engine' / 'test_rules.py'
    return [ROOT / 'tests' / 'gpu', *([] if 'transformer_engine' in left_out else [rules])]


def command(
    tests: Sequence[Path], results: Path, left_out: Sequence[str], longest_s: int = _LONGEST_S
) -> list[str]:
    """Command line that runs the tests.

    A hanging test ends the run, and its stack is printed: the test may block in CUDA, where no
    signal reaches it, and the stage would otherwise end without a message.
    """
    arguments = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider']
    arguments += [
        *map(str, tests),
        f'--timeout={longest_s}',
        '--timeout-method=thread',
        f'--junit-xml={results}',
    ]
    if left_out:
        arguments += ['-m', ' and '.join(f'not {marker}' for marker in left_out)]
    return arguments


def deselected(gpus: int, has: Callable[[str], bool]) -> list[str]:
    """Markers of tests that cannot run here; any other skipped test on a GPU is a failure."""
    runs = {
        'nvml': has('pynvml'),
        'transformer_engine': has('transformer_engine'),
        'two_gpus': gpus >= 2,
    }
    return [marker for marker, here in runs.items() if not here]


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def counts(results: str) -> dict[str, int]:
    """Numbers of tests, failures, errors and skipped tests in a JUnit file, by these names."""
    suites = ElementTree.fromstring(results).iter('testsuite')
    total = dict.fromkeys(('tests', 'failures', 'errors', 'skipped'), 0)
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, 0))
    return total
