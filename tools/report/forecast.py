# SPDX-License-Identifier: Apache-2.0
"""Comparison of a plan with measurements."""

import statistics
from collections import Counter
from pathlib import Path

import msgspec

from ..lab.errors import LabError
from ..lab.history import History, Shares
from ..lab.text import duration, size


class Plan(msgspec.Struct):
    """The used part of the JSON of `tools.plan`; seconds and bytes."""

    iteration_s: float
    window: int
    overhead_s: float
    host_memory_bytes_per_node: dict[str, int]
    mtbf_s: float | None
    """None: no failures."""
    expected_recovery_s: float

    def ettr(self, mtbf_s: float | None) -> float:
        """Effective training time ratio at another MTBF, by first order (None: no failures)."""
        ratio = self.iteration_s / (self.iteration_s + self.overhead_s)
        return ratio if mtbf_s is None else ratio / (1 + self.expected_recovery_s / mtbf_s)


def read_plan(path: Path) -> Plan:
    """Read a plan."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan)
    except OSError as error:
        raise LabError(f'--plan {path}: {error.strerror}') from error
    except msgspec.MsgspecError as error:
        raise LabError(
            f'--plan {path}: {error}; give what `moevement plan --json` printed'
        ) from error


def compare(plan: Plan, history: History, shares: Shares | None) -> list[tuple[str, str, str]]:
    """Name of each figure, planned, measured; a dash where the run has none yet."""
    pace = history.pace
    downs = [episode.end - episode.start for episode in history.episodes if episode.end]
    nodes: Counter[str] = Counter()
    for place in history.places.values():
        nodes[place.node] += sum(place.host_memory.values())
    planned_memory = plan.host_memory_bytes_per_node.get('total', 0)
    return [
        ('window', str(plan.window), str(history.window or '–')),
        ('iteration', duration(plan.iteration_s),
         duration(pace.iteration_s - pace.exposed_s) if pace else '–'),
        ('held up per iteration', duration(plan.overhead_s),
         duration(pace.exposed_s) if pace else '–'),
        ('host memory of the fullest node', size(planned_memory),
         size(max(nodes.values())) if nodes else '–'),
        ('time between failures', duration(plan.mtbf_s) if plan.mtbf_s else 'no failures',
         duration(history.mtbf_s) if history.mtbf_s else 'no failures'),
        ('time lost by a failure', duration(plan.expected_recovery_s),
         duration(statistics.mean(downs)) if downs else '–'),
        ('ETTR at the planned failure rate', f'{plan.ettr(plan.mtbf_s):.4f}', '–'),
        ('ETTR at the failure rate of the run', f'{plan.ettr(history.mtbf_s):.4f}',
         f'{shares.ettr:.4f}' if shares else '–'),
    ]  # fmt: skip
