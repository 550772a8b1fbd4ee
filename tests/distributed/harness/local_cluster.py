# SPDX-License-Identifier: Apache-2.0
"""Jobs under `moevement launch` rather than under the harness's own launcher."""

import os
import subprocess
import sys

from tests.distributed.harness.cluster import ROOT, Cluster

PROGRAM = """
from megatron.moevement import pretrain_gpt
{imported}

MOEVEMENT_SPARES = True

def main():
    {called}
    pretrain_gpt.main()

if __name__ == '__main__':
    main()
"""
TIMEOUT_S = 540.0


def launch(job: Cluster, *flags: str, mutation: str | None = None) -> tuple[int, str]:
    """Run the job to its end; return its exit status and its output.

    Args:
        job: a job with one worker on each emulated node.
        flags: flags of the launcher.
        mutation: `module.function` of `mutations`, called by every worker before training.
    """
    job.directory.mkdir(parents=True, exist_ok=True)
    module, _, function = (mutation or '').partition('.')
    program = job.directory / 'program.py'
    program.write_text(
        PROGRAM.format(
            imported=f'from tests.distributed.mutations import {module}' if module else '',
            called=f'{module}.{function}()' if module else 'pass',
        )
    )
    command = [sys.executable, '-m', 'moevement_ext.launch.command_line']
    command += ['--nodes', str(job.ranks), *flags, '--', str(program), *job.flags]
    log = job.directory / f'launcher{job.attempts}.log'
    job.attempts += 1
    with log.open('wb') as output:
        done = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, 'PYTHONPATH': str(ROOT), **job.site()},
            timeout=TIMEOUT_S,
            check=False,
        )
    return done.returncode, log.read_text(errors='replace')
