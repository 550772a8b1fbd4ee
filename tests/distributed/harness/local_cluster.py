# SPDX-License-Identifier: Apache-2.0
"""Jobs under `scripts/local_cluster.py` rather than under the harness's own launcher."""

import os
import subprocess
import sys

from tests.distributed.harness.cluster import ROOT, Cluster


def launch(job: Cluster, *flags: str, mutation: str | None = None) -> tuple[int, str]:
    """Run the job to its end; returns its exit status and all it printed.

    Args:
        job: on emulated nodes of one worker.
        flags: of the launcher.
        mutation: `module.function` of `mutations`, called by every worker before training.
    """
    job.directory.mkdir(parents=True, exist_ok=True)
    program = job.directory / 'program.py'
    module = (mutation or '').partition('.')[0]
    broken = f'from tests.distributed.mutations import {module}\n{mutation}()\n' if module else ''
    program.write_text(f'import pretrain_gpt\n\n{broken}pretrain_gpt.main()\n')
    command = [sys.executable, str(ROOT / 'scripts' / 'local_cluster.py')]
    command += ['--nodes', str(job.ranks), *flags, '--', str(program), *job.flags]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout
