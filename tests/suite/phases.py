# SPDX-License-Identifier: Apache-2.0
"""The phases of the suite, run one after the other so that none disturbs another."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.suite import selection, shards
from tests.suite.sessions import FLAKY, Result, keep, session, tried_again

ROOT = selection.ROOT
MAY_BE_FLAKY = 5
"""If more timed cases than these fail, a busy machine is not the cause."""

SOURCES = ['setup.py', 'moevement_ext', 'megatron', 'tools', 'examples', 'tests']
SOURCES += ['pretrain_gpt.py']
LINT = {
    'format': ['ruff', 'format', '--check', '--quiet', *SOURCES],
    'ruff': ['ruff', 'check', '--quiet', *SOURCES],
    'mypy': ['mypy', 'moevement_ext', 'megatron/moevement', 'tools', 'examples'],
}
_CPUS = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Plan:
    """Selection of what to run; by default the default suite."""

    thorough: bool = False
    """Also cases that others nearly cover, and cases that need root or a cluster."""
    shard: shards.Shard | None = None
    """Only this part of each phase."""
    record: bool = False
    """Write the durations of the test files to `shards.DURATIONS`."""


@dataclass(frozen=True)
class Phase:
    """One session of pytest."""

    name: str
    folders: tuple[str, ...]
    options: tuple[str, ...] = ()
    mark: str | None = None
    """Only files that contain this mark; others need not be imported."""
    retried: bool = False
    """True if a failed case is run once more, alone. Never where bits are compared."""

    def files(self) -> list[str]:
        """Paths for pytest, relative to the root."""
        if self.mark is None:
            return list(self.folders)
        found = [path for folder in self.folders for path in (ROOT / folder).rglob('test_*.py')]
        marked = [path for path in found if f'mark.{self.mark}' in path.read_text('utf-8')]
        return sorted(str(path.relative_to(ROOT)) for path in marked)


def phases(thorough: bool) -> list[Phase]:
    """All sessions of pytest, in order."""
    # Timed cases mostly wait, so many can run at a time.
    many, few, two = str(min(12, max(4, 3 * _CPUS))), str(max(2, _CPUS)), str(min(2, _CPUS))
    unit = ('tests/unit', 'tests/rules', 'tests/fuzz')
    train = ('tests/distributed',)
    found = [
        Phase('timed', unit, ('-m', 'timed', '-n', many, '--dist', 'worksteal'), 'timed', True),
        Phase('unit', unit, ('-m', 'not timed', '-n', few, '--dist', 'loadfile')),
        # A job waits for a third of its time: for the detection of a death, for processes to start.
        Phase('train', train, ('-m', 'not launcher', '-n', two, '--dist', 'worksteal')),
        Phase('launchers', train, ('-m', 'launcher'), 'launcher'),
    ]
    if thorough:
        found.append(Phase('cluster', ('tests/cluster', 'tests/image')))
    # In their own session: all other tests train on the CPU, without GPU or Transformer Engine.
    if shutil.which('nvidia-smi') or importlib.util.find_spec('transformer_engine'):
        found.append(Phase('gpu', ('tests/gpu', 'tests/transformer_engine')))
    return found


def run_all(plan: Plan) -> int:
    """Run all phases, even after a failed one; return the exit status."""
    results = []
    if plan.shard is None or plan.shard.number == 1:
        results.append(_shown(_lint))
    for phase in phases(plan.thorough):
        results.append(_shown(lambda: _run(phase, plan)))  # noqa: B023
    outcomes = keep(results)
    if plan.record:
        shards.record(outcomes)
    return _conclude(results)


def _shown(run: Callable[[], Result]) -> Result:
    """Run a phase and print its result at once."""
    start = time.monotonic()
    result = run()
    result.seconds = time.monotonic() - start
    print(f'[test] {result}', flush=True)
    return result


def _lint() -> Result:
    result = Result('lint')
    for name, command in LINT.items():
        print(f'\n[test] lint: {name}', flush=True)
        if subprocess.call([sys.executable, '-m', *command], cwd=ROOT) != 0:
            result.red.append(name)
    return result


def _run(phase: Phase, plan: Plan) -> Result:
    """Run one session; retry cases that may have failed because the machine was busy."""
    options = [*phase.options, *['--thorough'] * plan.thorough]
    if plan.shard is not None:
        options.append(f'--shard={plan.shard}')
    some = plan.shard is not None
    result = session(phase.name, [*options, *phase.files()], may_be_empty=some)
    return tried_again(result) if phase.retried and len(result.red) <= MAY_BE_FLAKY else result


def _conclude(results: list[Result]) -> int:
    """Print all phases and their failed cases; return the exit status."""
    print('\n[test] all phases')
    for result in results:
        print(f'[test] {result}')
        for case in result.red:
            print(f'[test]     red: {case}')
        for case in result.flaky:
            print(f'[test]     flaky: {case}, see {FLAKY.relative_to(ROOT)}')
    seconds = sum(result.seconds for result in results)
    red = any(result.red for result in results)
    print(f'[test] {"RED" if red else "green"} after {int(seconds) // 60} min {seconds % 60:.0f} s')
    return int(red)
