# SPDX-License-Identifier: Apache-2.0
"""Sessions of pytest, and the outcomes of their cases."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest import SubtestReport

from tests.suite.selection import ROOT

PYTEST = [sys.executable, '-u', '-m', 'pytest']
NO_TESTS = 5
"""Exit status of pytest if no case was selected."""
OF_BITS = ('torch.equal', 'differences', 'differing', 'digest')
"""Words in the report of a case that compares bits: such a case is never retried."""
RESULTS = ROOT / 'test-results'
OUTCOMES = RESULTS / 'outcomes.json'
"""Outcome, seconds and machine load at the end of each case of the last run."""
FLAKY = RESULTS / 'flaky.jsonl'
"""Cases that failed among others and passed alone, one per line."""


@dataclass
class Result:
    name: str
    seconds: float = 0.0
    red: list[str] = field(default_factory=list)
    """Failed cases or linters, or the failure of the session itself."""
    flaky: list[str] = field(default_factory=list)
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        state = f'RED ({len(self.red)})' if self.red else 'green'
        flaky = f', {len(self.flaky)} flaky' if self.flaky else ''
        return f'{self.name:12}{state:10}{self.seconds:6.0f} s{flaky}'


def session(name: str, arguments: Iterable[str], may_be_empty: bool = False) -> Result:
    """Run pytest, with its output shown as it is written."""
    print(f'\n[test] {name}', flush=True)
    result = Result(name)
    with tempfile.NamedTemporaryFile(suffix='.json') as file:
        command = [*PYTEST, '-q', '--durations=5', f'--outcomes={file.name}', *arguments]
        status = subprocess.call(command, cwd=ROOT)
        written = Path(file.name).read_text('utf-8')
    result.outcomes = json.loads(written) if written else {}
    result.red = [case for case, one in result.outcomes.items() if one['outcome'] == 'failed']
    expected = {0, NO_TESTS} if may_be_empty else {0}
    if status not in expected and not result.red:
        result.red.append(f'the session ended with exit status {status}')
    return result


def tried_again(result: Result) -> Result:
    """Run the failed cases once more, alone. Cases that then pass are flaky: noted, not failed.

    Cases that compare bits stay failed, and so do failures outside of cases.
    """
    cases = [case for case in result.red if not result.outcomes.get(case, {}).get('bits', True)]
    if not cases:
        return result
    again = session(f'{result.name}: what is red, alone', cases)
    result.flaky = [
        case for case in cases if again.outcomes.get(case, {}).get('outcome') == 'passed'
    ]
    result.red = [case for case in cases if case not in result.flaky]
    RESULTS.mkdir(exist_ok=True)
    with FLAKY.open('a', encoding='utf-8') as file:
        for case in result.flaky:
            line = {'time': time.strftime('%F %T'), 'case': case, **result.outcomes[case]}
            file.write(json.dumps(line) + '\n')
    return result


def keep(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    outcomes = {case: one for result in results for case, one in result.outcomes.items()}
    RESULTS.mkdir(exist_ok=True)
    OUTCOMES.write_text(json.dumps(outcomes, indent=0) + '\n', 'utf-8')
    return outcomes


class Outcomes:
    """A pytest plugin that writes the outcome of each case to a file when the session ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cases: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        """Record set-up, call or tear-down of a case, from any pytest worker."""
        case = self._cases.setdefault(report.nodeid, {'outcome': 'passed', 'seconds': 0.0})
        if not isinstance(report, SubtestReport):  # its time is in that of its case
            case['seconds'] = round(case['seconds'] + report.duration, 3)
        if report.failed:
            text = str(report.longrepr)
            case.update(outcome='failed', load=os.getloadavg(), error=text[-300:])
            case['bits'] = any(word in text for word in OF_BITS)
        elif report.skipped and case['outcome'] == 'passed':
            case['outcome'] = 'skipped'

    def pytest_collectreport(self, report) -> None:  # type: ignore[no-untyped-def]
        """Record a file that cannot be imported as failed."""
        if report.failed:
            self._cases[report.nodeid] = {'outcome': 'failed', 'seconds': 0.0}

    def pytest_sessionfinish(self) -> None:
        """Write the file, even after an interrupt."""
        self._path.write_text(json.dumps(self._cases), 'utf-8')
