# SPDX-License-Identifier: Apache-2.0
"""Common frame of the programs that run jobs."""

import argparse
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from moevement_ext.config import ConfigurationError

from .errors import LabError
from .models import prepare_text


def prepare(args: argparse.Namespace, name: str) -> tuple[Path, Path]:
    """Return an empty folder below `--output`, and the prefix of the text to train on."""
    output: Path = args.output.resolve()
    shutil.rmtree(output / name, ignore_errors=True)
    (output / name).mkdir(parents=True)
    return output / name, prepare_text(output / 'data')


def run_tool(name: str, work: Callable[[Console], int]) -> int:
    """Return the exit status of `work`; 2 if it raises `LabError` or `ConfigurationError`.

    The error is printed after the name of the tool. Main thread only.
    """
    exit_on_sigterm()
    console, errors = Console(), Console(stderr=True)
    try:
        return work(console)
    except (ConfigurationError, LabError) as error:
        if tail := getattr(error, 'tail', ''):
            errors.print(tail, markup=False, highlight=False, soft_wrap=True)
        errors.print(f'{name}: {error}', style='bold red', markup=False, soft_wrap=True)
        return 2


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that jobs stop and memory is freed. Main thread only."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
