# SPDX-License-Identifier: Apache-2.0
"""The table of docs/planning.md is that of the planner."""

import dataclasses
import functools
from pathlib import Path

from tools.plan import table

TABLE = functools.cache(table.table)
PAGE = Path(__file__).parents[4] / 'docs' / 'planning.md'


def test_table_equals_the_planner_results():
    assert TABLE() in PAGE.read_text('utf-8'), 'python -m tools.plan.table prints it anew'


def test_all_presets_have_a_plan_with_the_defaults():
    rows = TABLE().splitlines()[2:]
    cells = [cell for row in rows for cell in row.strip('| ').split(' | ')[1:]]
    assert len(cells) == 21
    assert not [cell for cell in cells if cell.startswith('none')]


def test_preset_without_a_plan_has_a_reason():
    job = table.preset_job('deepseek-v3', 'h100')
    small = dataclasses.replace(job.cluster, host_memory_bytes=1e9)
    assert 'but a node has 0.93 GiB' in table.cell(dataclasses.replace(job, cluster=small))
