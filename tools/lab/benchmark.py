# SPDX-License-Identifier: Apache-2.0
"""Common frame of the programs that run jobs."""

import argparse
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from .errors import LabError
from .figures import write_json
from .models import prepare_text


def prepare(args: argparse.Namespace, name: str) -> tuple[Path, Path]:
    """Return an empty folder below `--output`, and the prefix of the text to train on."""
    output: Path = args.output.resolve()
    shutil.rmtree(output / name, ignore_errors=True)
    (output / name).mkdir(parents=True)
    return output / name, prepare_text(output / 'data')


def run_benchmark[R](
    name: str,
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace, Console], R],
    show: Callable[[R, Console], None],
) -> int:
    """Measure, write, show; returns the exit status: 0 done, 1 not `exact`, 2 no result.

    Args:
        name: name of the tool, shown before an error.
        args: parsed arguments; `json`, and `table` if there is one, are files for the report, or
            None. Unless they can be written, nothing is measured.
        measure: returns the report, which may have `exact`; raises `LabError` if there is none.
        show: prints the report for people.
    """
    console = Console()
    try:
        for flag in ('json', 'table'):
            _require_writable(flag, getattr(args, flag, None))
        report = measure(args, console)
    except LabError as error:
        print_failure(console, name, error)
        return 2
    if args.json:
        write_json(args.json, report)
    show(report, console)
    return 0 if getattr(report, 'exact', True) else 1


def _require_writable(flag: str, target: Path | None) -> None:
    try:
        if target:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.open('ab').close()
    except OSError as error:
        raise LabError(f'--{flag} {target}: {error.strerror}') from error


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that jobs stop and memory is freed. Main thread only."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


def print_failure(console: Console, tool: str, error: Exception) -> None:
    if tail := getattr(error, 'tail', ''):
        console.print(tail, markup=False, highlight=False, soft_wrap=True)
    console.print(f'{tool}: {error}', style='bold red', markup=False, soft_wrap=True)
