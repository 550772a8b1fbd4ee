# SPDX-License-Identifier: Apache-2.0
"""Plans of all presets on all clusters with the defaults, as the table of docs/planning.md.

python -m tools.plan.table
"""

from moevement_ext.memory.budget import GIB
from moevement_ext.plan.byte_planner import InfeasiblePlan
from tools.lab.tables import markdown
from tools.plan.planning import Job, iteration_seconds, plan_job
from tools.plan.presets import CLUSTERS, PRESETS
from tools.plan.report import infeasible

UTILIZATION = 0.35


def preset_job(name: str, cluster: str) -> Job:
    """A preset with the settings of a training without flags."""
    preset, machine = PRESETS[name], CLUSTERS[cluster]
    seconds = iteration_seconds(preset.model, preset.layout, preset.batch, machine, UTILIZATION)
    return Job(preset.model, preset.layout, preset.batch, machine, seconds)


def cell(job: Job) -> str:
    """W of the longest window that fits, GiB used and needed per node; or why there is no plan."""
    try:
        plan = plan_job(job)
    except InfeasiblePlan as error:
        return f'none: {error}'
    refused = infeasible(plan)
    if refused is not None:
        return f'none: {refused}'
    needed = plan.host_memory().node_total
    taken = f'{plan.taken_bytes() / GIB:.0f} of {needed / GIB:.0f} GiB'
    return f'{plan.window} of {plan.longest}, {taken}'


def table() -> str:
    head = ['Model', *(f'`{name}`' for name in CLUSTERS)]
    rows = [
        [f'`{model}`', *(cell(preset_job(model, cluster)) for cluster in CLUSTERS)]
        for model in PRESETS
    ]
    return markdown(head, rows)


if __name__ == '__main__':
    print(table(), end='')
