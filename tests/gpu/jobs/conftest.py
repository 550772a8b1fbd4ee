# SPDX-License-Identifier: Apache-2.0
"""Collects findings, and shows and writes their figures, which are kept if a later part fails."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.jobs.findings import Findings, Settings
from tools.bench.frame import Hardware
from tools.lab.figures import write_json
from tools.lab.programs import LabError

NAME = 'gpu-check.json'
Passes = Callable[[Iterable[Findings]], None]


@pytest.fixture(scope='session')
def settings(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    output, gpu = pytestconfig.getoption('--output', None), not pytestconfig.getoption('--cpu', 0)
    if gpu and not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    memory = pytestconfig.getoption('--memory', Path('/dev/shm'))
    return Settings(output or tmp_path_factory.mktemp('gpu-check'), memory, gpu)


@pytest.fixture
def passes(record_property: Callable[[str, Any], None]) -> Passes:
    """Fails with all problems once all parts are over."""

    def consume(parts: Iterable[Findings]) -> None:
        problems: list[str] = []
        try:
            for part in parts:
                problems += part.problems
                for name, figure in part.figures.items():
                    record_property(name, figure)
        except LabError as error:
            print(error.tail)
            problems.append(str(error))
        assert not problems, '\n'.join(problems)

    return consume


class Report:
    """Figures of the tests, in a file that is written after each test."""

    def __init__(self, config: pytest.Config) -> None:
        gpu = not config.getoption('--cpu') and torch.cuda.is_available()
        self._path = config.getoption('--output') / NAME
        self._hardware = Hardware.here(gpu)
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != 'call' or report.skipped:
            return
        name = report.nodeid.rpartition('::')[2]
        figures = dict(report.user_properties)
        passed, seconds = report.passed, report.duration
        self._tests[name] = {'passed': passed, 'seconds': seconds, 'figures': figures}
        write_json(self._path, {'hardware': self._hardware, 'tests': self._tests})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f'figures, on {self._hardware.line()}')
        for name, test in self._tests.items():
            shown = ' '.join(
                f'{key}={value:.4g}' if isinstance(value, float) else f'{key}={value}'
                for key, value in test['figures'].items()
                if not isinstance(value, dict | list)
            )
            verdict = 'PASS' if test['passed'] else 'FAIL'
            terminalreporter.write_line(f'{verdict} {name} ({test["seconds"]:.0f} s) {shown}')
        terminalreporter.write_line(f'all figures: {self._path}')


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup('gpu check').addoption
    add('--output', type=lambda text: Path(text).resolve(), metavar='DIR',
        help=f'folder for logs, and for {NAME} with all figures')  # fmt: skip
    add('--memory', type=Path, default=Path('/dev/shm'), help='a tmpfs with 40 GiB free')
    add('--cpu', action='store_true', help='dry run: no GPU, gloo, tiny models')


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption('--output', None):
        config.pluginmanager.register(Report(config))
