# SPDX-License-Identifier: Apache-2.0
"""Check: the speed of captures to host memory, and the delay of other work.

The probe runs with one connection of the device, as jobs with tensor parallelism do, and with
torch's default number.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.gpu.jobs.findings import Findings, Settings
from tools.lab.launch import ROOT
from tools.lab.programs import LabError

_CONNECTIONS = ('1', '8')
# Bandwidth into registered pages of a tmpfs, and of captures, divided by that into pinned memory.
_LEAST_OF_PINNED = 0.95
# 99th percentile of small copies during a capture: the time of two 32 MiB pieces, and a margin.
_SLOWEST_SMALL_MS = 3.0
_SHOWN = ('pinned_gb_s', 'registered_gb_s', 'register_gib_s', 'busy_over_limit')


def run(settings: Settings) -> Iterator[Findings]:
    """Measure with each number of connections; a failure loses only the figures of its number."""
    folder = settings.folder('copies')
    for connections in _CONNECTIONS:
        try:
            probed = _probe(settings, connections, folder / f'probe-{connections}.json')
        except LabError as error:
            missing = f'the figures with connections={connections} are missing: {error}'
            yield Findings({}, [missing])
            continue
        figures = {f'{name}_{connections}': probed[name] for name in _SHOWN}
        figures[f'small_p99_ms_{connections}'] = probed['small_copy']['beside']['p99_ms']
        figures[f'connections_{connections}'] = probed
        problems = judge(probed) if settings.gpu else []
        yield Findings(figures, [f'connections={connections}: {text}' for text in problems])


def judge(probed: dict[str, Any]) -> list[str]:
    problems = []
    if not probed['identical']:
        problems.append('what was captured is not the state at its iteration')
    over = probed['registered_gb_s'] / probed['pinned_gb_s']
    if over < _LEAST_OF_PINNED:
        problems.append(f'copies into a registered tmpfs reach {over:.2f} of pinned memory')
    if probed['busy_over_limit'] < _LEAST_OF_PINNED:
        problems.append(
            f'captures reach {probed["busy_over_limit"]:.2f} of one large copy into pinned memory'
        )
    slowest = probed['small_copy']['beside']['p99_ms']
    if slowest > _SLOWEST_SMALL_MS:
        problems.append(f'1 of 100 small copies waits {slowest:.1f} ms behind a capture')
    return problems


def _probe(settings: Settings, connections: str, target: Path) -> dict[str, Any]:
    """Figures of one process; its error output is shown, and kept next to `target`."""
    device = 'gpu' if settings.gpu else 'cpu'
    command = [sys.executable, '-m', 'tests.gpu.jobs.copy_probe']
    command += [str(settings.memory), device, str(target)]
    environment = {**os.environ, 'CUDA_DEVICE_MAX_CONNECTIONS': connections}
    log = target.with_suffix('.log')
    with log.open('wb') as errors:
        try:
            code = subprocess.run(command, cwd=ROOT, env=environment, stderr=errors).returncode
        finally:
            said = log.read_text('utf-8', errors='replace')
            print(said, end='', file=sys.stderr, flush=True)
    if code or not target.exists():
        why = said.strip().splitlines()[-1:] or ['it did not say why']
        raise LabError(f'the copy probe ended with exit status {code}: {why[0]}')
    return msgspec.json.decode(target.read_bytes())
