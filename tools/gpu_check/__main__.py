# SPDX-License-Identifier: Apache-2.0
"""Checks on one GPU, in stages, what the tests of this repository cannot show on a CPU.

    scripts/gpu_check.sh                    # all stages that have not passed yet
    scripts/gpu_check.sh --stage nccl       # this one, also if it has passed
    scripts/gpu_check.sh --cpu              # a dry run without a GPU

Each stage takes less than ten minutes. After each, OUTPUT/gpu-check.json has the findings and the
hardware; the next call continues from there, unless the code, megatron-core, Transformer Engine or
NCCL has changed: then all stages run again. A stage that is interrupted counts as failed, but its
findings so far are kept, too. At the end the tool prints a line for each stage (PASS or FAIL with
figures); then whether localized recovery is exact, the cost of windows and the speed of captures;
last, the stages that did not run. On a borrowed machine, copy OUTPUT before the machine is
returned.

Exit status: 0 all stages to run have passed, 1 a stage failed, 2 there is no GPU, or the output
folder belongs to another machine or GPU.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from tools.gpu_check.report import NOTHING, Findings, Report, Settings, StageResult, load, save
from tools.gpu_check.stages import STAGES, possible
from tools.lab.arguments import Parser
from tools.lab.benchmark import exit_on_sigterm
from tools.lab.errors import LabError
from tools.lab.evidence import Tier
from tools.lab.launch import GRACE_S, ROOT, family

# Time limit of a stage.
_LIMIT_S = 570


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    stages = '\n'.join(f'  {name:18} {stage.proves}' for name, stage in STAGES.items())
    parser = Parser(
        prog='scripts/gpu_check.sh',
        description=__doc__,
        epilog=f'stages, and what each shows:\n{stages}',
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        '--wheels',
        metavar='DIR',
        help='make .venv-gpu around the python3 on the PATH with the wheels in DIR, for a machine '
        'where nothing can be downloaded; read by the script (default: .venv)',
    )
    add('--stage', choices=list(STAGES), help='run only this stage, even if it has passed')
    add('--output', type=Path, default=Path('runs/gpu-check'), help='folder for results and logs')
    add('--memory', type=Path, default=Path('/dev/shm'), help='a tmpfs with 40 GiB free')
    add('--cpu', action='store_true', help='dry run: no GPU, gloo, tiny models')
    args = parser.parse_args(argv)
    if not args.memory.is_dir():
        parser.error(f'--memory {args.memory}: no such directory; give one in a tmpfs')
    return args


def run_apart(name: str, settings: Settings) -> StageResult:
    """Run a stage in a new process, and end all processes that the stage leaves.

    Findings are written next to the report at once, so they survive the end of this process.
    """
    print(f'\n== {name}: {STAGES[name].proves}', flush=True)
    began = time.monotonic()
    target = settings.output / f'{name}-so-far.json'
    target.unlink(missing_ok=True)
    device = 'gpu' if settings.gpu else 'cpu'
    command = [sys.executable, '-m', 'tools.gpu_check.stages', name]
    command += [str(settings.output), str(settings.memory), device, str(target)]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        ended = _ended(process)
    finally:
        _end(process)
    found = NOTHING
    if target.exists():
        found = msgspec.json.decode(target.read_bytes(), type=Findings)
        target.unlink()
    problems = found.problems if found.done else [*found.problems, ended]
    return StageResult(not problems, time.monotonic() - began, found.figures, problems)


def _ended(process: subprocess.Popen[bytes]) -> str:
    """Wait for a stage; returns a problem if the stage ended without all findings."""
    try:
        return f'it ended with exit status {process.wait(_LIMIT_S)}; its last lines say why'
    except subprocess.TimeoutExpired:
        return f'it was not done within {_LIMIT_S} s'


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage, by SIGTERM first, so that it ends its own jobs."""
    if process.poll() is None:
        left = family([psutil.Process(process.pid)])
        process.terminate()
        left = psutil.wait_procs(left, timeout=2 * GRACE_S)[1]
        for survivor in family(left):
            survivor.kill()
    process.wait()


def check(settings: Settings, only: str | None) -> Report:
    """Run all stages that have not passed yet, or one stage.

    Raises:
        LabError: the output folder belongs to another machine or GPU.
    """
    report = load(settings.output, Report.here(settings.gpu))
    for name in [only] if only else possible(settings.gpu):
        if not only and report.passed(name):
            print(f'\n== {name}: has passed already', flush=True)
            continue
        report = report.with_stage(name, run_apart(name, settings))
        save(settings.output, report)
        print('\n'.join(report.stages[name].lines(name)), flush=True)
        if name == 'environment' and not report.passed(name):
            break  # later stages would prove nothing
    return report


def summary(report: Report) -> str:
    """A line for each stage, with the hardware; the three answers; stages that did not run."""
    head = 'a DRY RUN, without a GPU, on ' if report.dry_run else ''
    lines = [f'gpu_check on {head}{report.hardware.line()}']
    for name in STAGES:
        result = report.stages.get(name)
        missing = '' if name in possible(not report.dry_run) else f': no {STAGES[name].needs}'
        lines += result.lines(name) if result else [f'---- {name} (not run{missing})']
    lines += answers(report)
    left = [name for name in STAGES if name not in report.stages]
    lines.append(f'not run: {", ".join(left) or "nothing"}')
    return '\n'.join(lines)


NOT_SHOWN = 'not shown'


def answers(report: Report) -> list[str]:
    """Whether localized recovery is exact, the cost of windows, and the speed of captures."""
    over = 'gloo' if report.dry_run else 'NCCL'
    return [
        f'localized recovery over {over}: {_exact(report.stages.get("four-rank"))}',
        f'exposed time of windows: {_exposed(_figures(report, "one-rank"))}',
        f'copies against pinned bandwidth: {_copies(_figures(report, "copies"))}',
    ]


def _exact(stage: StageResult | None) -> str:
    if stage is None or 'came_back' not in stage.figures:
        return NOT_SHOWN
    came_back = stage.figures['came_back']
    if came_back != Tier.LOCALIZED:
        return f'{NOT_SHOWN}: the lost rank came back by {came_back}'
    return 'exact' if stage.passed else f'NOT exact, or not clean: {"; ".join(stage.problems)}'


def _exposed(figures: dict[str, Any]) -> str:
    parts = [
        f'{figures[f"{prefix}exposed_ms"]:.2f} ms of {figures["plain_ms"]:.1f} ms an iteration '
        f'({figures[f"{prefix}exposed_ms"] / figures["plain_ms"]:.2%}) with {window}'
        for prefix, window in (('', 'a fixed window'), ('auto_', 'window auto'))
        if f'{prefix}exposed_ms' in figures and figures.get('plain_ms')
    ]
    return ', '.join(parts) or NOT_SHOWN


def _copies(figures: dict[str, Any]) -> str:
    parts = [
        f'{figures[f"registered_gb_s_{number}"]:.1f} of {figures[f"pinned_gb_s_{number}"]:.1f} '
        f'GB/s, captures during compute {figures[f"busy_over_limit_{number}"]:.2f} of it, with '
        f'connections={number}'
        for number in ('1', '8')
        if f'busy_over_limit_{number}' in figures
    ]
    return '; '.join(parts) or NOT_SHOWN


def _figures(report: Report, name: str) -> dict[str, Any]:
    stage = report.stages.get(name)
    return {} if stage is None else stage.figures


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if not args.cpu and not torch.cuda.is_available():
        print(
            'gpu_check: there is no CUDA device here; run it on a machine with a GPU, or with '
            '--cpu for a dry run',
            file=sys.stderr,
        )
        return 2
    settings = Settings(args.output.resolve(), args.memory.resolve(), not args.cpu)
    try:
        report = check(settings, args.stage)
    except LabError as error:
        print(f'gpu_check: {error}', file=sys.stderr)
        return 2
    print(f'\n{summary(report)}', flush=True)
    wanted = [args.stage] if args.stage else possible(settings.gpu)
    return 0 if all(report.passed(name) for name in wanted) else 1


if __name__ == '__main__':
    exit_on_sigterm()
    sys.exit(main())
