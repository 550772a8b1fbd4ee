# SPDX-License-Identifier: Apache-2.0
"""Runs jobs under the real launcher: `torchrun` agents in separate processes."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.distributed.harness.cluster import ROOT


@contextmanager
def agent(
    launch: Sequence[str],
    flags: Sequence[str],
    log: Path,
    module: str = 'torch.distributed.run',
    program: str = 'pretrain_gpt.py',
    **env: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run one agent with its workers; kill all of them at the end of the context.

    Args:
        launch: flags of torchrun.
        flags: flags of the program.
        log: file for the output of agent and workers.
        module: module that implements torchrun.
        program: file that takes these flags.
        env: additional environment variables.
    """
    command = [sys.executable, '-m', module, *launch, program, *flags]
    given = {'CUDA_DEVICE_MAX_CONNECTIONS': '1', 'MOEVEMENT_SECRET': 'that of all tests'}
    environment = {**os.environ, **given, **env}
    with log.open('wb') as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    family = [psutil.Process(process.pid)] if process.poll() is None else []
    family += [child for parent in family for child in parent.children(recursive=True)]
    for member in family:
        member.kill()
    process.wait()
    psutil.wait_procs(family)
