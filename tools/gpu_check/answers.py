# SPDX-License-Identifier: Apache-2.0
"""The three main results of a check, one line each, with the measured figures."""

from typing import Any

from tools.gpu_check.report import Report, StageResult
from tools.lab.evidence import Tier

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
        f'GB/s, captures beside compute {figures[f"busy_over_limit_{number}"]:.2f} of it, with '
        f'connections={number}'
        for number in ('1', '8')
        if f'busy_over_limit_{number}' in figures
    ]
    return '; '.join(parts) or NOT_SHOWN


def _figures(report: Report, name: str) -> dict[str, Any]:
    stage = report.stages.get(name)
    return {} if stage is None else stage.figures
