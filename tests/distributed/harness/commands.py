# SPDX-License-Identifier: Apache-2.0
"""Runs programs to their end; reports their output if they do not end."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.distributed.harness.cluster import ROOT

_SHOWN = 8000
"""Characters at the end of each stream."""


def run_to_end(
    command: Sequence[str],
    timeout_s: float,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program; both of its output streams are in the result.

    Raises:
        AssertionError: it takes too long; the message has the end of its output.
    """
    try:
        return subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as late:
        printed = [
            (stream or b'').decode(errors='replace') for stream in (late.stdout, late.stderr)
        ]
    said = '\n'.join(stream[-_SHOWN:] for stream in printed)
    raise AssertionError(f'{" ".join(command)} did not end in {timeout_s:g} s\n{said}')
