# SPDX-License-Identifier: Apache-2.0
"""Stage: how fast are copies to host memory, and what do they hold up?

The probe runs with one connection of the device, as jobs are launched with tensor parallelism, and
with torch's own number; the capture path of the product as `tools.bench.gpu_copy` measures it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tools.gpu_check.report import Findings
from tools.gpu_check.settings import Settings
from tools.lab.errors import LabError
from tools.lab.launch import ROOT

_CONNECTIONS = ('1', '8')
_LEAST_OF_PINNED = 0.95
"""Bandwidth into registered pages of a tmpfs, and of captures, over that into pinned memory."""
_SLOWEST_SMALL_MS = 3.0
"""99 of 100 small copies beside paced bulk copies: two pieces of 32 MiB and some."""
_SPINNING = 0.1
"""CPU seconds of a wait that blocks, per second."""
_SHOWN = ('pinned_gb_s', 'registered_gb_s', 'register_gib_s')
_GPU_BYTES, _CPU_BYTES = 6 << 30, 64 << 20


def run(settings: Settings) -> Iterator[Findings]:
    """Measure with each number of connections, then the product; what fails costs its figures."""
    folder = settings.folder('copies')
    for connections in _CONNECTIONS:
        try:
            probed = _probe(settings, connections, folder / f'probe-{connections}.json')
        except LabError as error:
            missing = f'the figures with connections={connections} are missing: {error}'
            yield Findings({}, [missing])
            continue
        figures = {f'{name}_{connections}': probed[name] for name in _SHOWN}
        figures[f'small_p99_ms_{connections}'] = probed['paced']['small_copy']['p99_ms']
        figures[f'queue_full_ms_{connections}'] = probed['queue_full']['launch']['max_ms']
        figures[f'connections_{connections}'] = probed
        problems = judge(probed) if settings.gpu else []
        yield Findings(figures, [f'connections={connections}: {text}' for text in problems])
    if settings.gpu:
        yield _captured(settings, folder / 'capture.json')


def _captured(settings: Settings, target: Path) -> Findings:
    try:
        capture, code = _capture(settings, target)
    except LabError as error:
        return Findings({}, [f'busy_over_limit is missing: {error}'])
    figures = {'busy_over_limit': capture['busy_over_limit'], 'capture': capture}
    problems = ['what was captured is not the state at its iteration'] if code else []
    return Findings(figures, problems + judge_capture(capture))


def judge(probed: dict[str, Any]) -> list[str]:
    """What is wrong with the figures of a probe."""
    problems = []
    over = probed['registered_gb_s'] / probed['pinned_gb_s']
    if over < _LEAST_OF_PINNED:
        problems.append(f'copies into a registered tmpfs reach {over:.2f} of pinned memory')
    if not probed['second_kernel_after_it']:
        problems.append('no kernel runs any more after a registration that CUDA refuses')
    slowest = probed['paced']['small_copy']['p99_ms']
    if slowest > _SLOWEST_SMALL_MS:
        problems.append(f'1 of 100 small copies waits {slowest:.1f} ms behind paced bulk copies')
    if probed['blocking_wait_cpu'] > _SPINNING:
        problems.append(f'a blocking event spins: {probed["blocking_wait_cpu"]:.2f} of its wait')
    return problems


def judge_capture(capture: dict[str, Any]) -> list[str]:
    """What is wrong with the bandwidth of captures beside compute."""
    over = capture['busy_over_limit']
    if over >= _LEAST_OF_PINNED:
        return []
    return [f'captures reach {over:.2f} of one large copy into pinned memory']


def _probe(settings: Settings, connections: str, target: Path) -> dict[str, Any]:
    device, size = ('gpu', _GPU_BYTES) if settings.gpu else ('cpu', _CPU_BYTES)
    command = ['tools.gpu_check.copy_probe', str(settings.memory), device, str(size), str(target)]
    code, why = _run(command, target, CUDA_DEVICE_MAX_CONNECTIONS=connections)
    if code or not target.exists():
        raise LabError(f'the copy probe ended with exit status {code}: {why}')
    return msgspec.json.decode(target.read_bytes())


def _capture(settings: Settings, target: Path) -> tuple[dict[str, Any], int]:
    command = ['tools.bench.gpu_copy', '--dir', str(settings.memory), '--state-gib', '10']
    code, why = _run([*command, '--repeats', '3', '--json', str(target)], target)
    if not target.exists():
        raise LabError(f'tools.bench.gpu_copy ended with exit status {code}: {why}')
    return msgspec.json.decode(target.read_bytes()), code


def _run(module: list[str], target: Path, **environment: str) -> tuple[int, str]:
    """Exit status, and the last line of its errors, which are shown and stay beside `target`."""
    command = [sys.executable, '-m', *module]
    log = target.with_suffix('.log')
    with log.open('wb') as errors:
        try:
            environment = {**os.environ, **environment}
            code = subprocess.run(command, cwd=ROOT, env=environment, stderr=errors).returncode
        finally:
            said = log.read_text('utf-8', errors='replace')
            print(said, end='', file=sys.stderr, flush=True)
    lines = said.strip().splitlines()
    return code, lines[-1] if lines else 'it did not say why'
