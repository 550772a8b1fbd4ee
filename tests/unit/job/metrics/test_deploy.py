# SPDX-License-Identifier: Apache-2.0
"""Dashboards and alerts use only existing metrics, and the documents name all metrics."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moevement_ext.job.metrics import INSTRUMENTS, Instrument
from tests.support.each import each

ROOT = Path(__file__).resolve().parents[4]
DASHBOARD = ROOT / 'deploy' / 'grafana' / 'moevement.json'
RULES = ROOT / 'deploy' / 'prometheus' / 'alerts.yml'
METRIC = re.compile(r'\bmoevement_\w+')


def prometheus_name(instrument: Instrument) -> str:
    return instrument.name + {'counter': '_total', 'histogram': '_bucket'}.get(instrument.kind, '')


BY_NAME = {prometheus_name(one): one for one in INSTRUMENTS}
COMMON = {'run', 'node', 'rank', 'le'}


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text('utf-8'))


def panels() -> list[Any]:
    return [panel for panel in dashboard()['panels'] if panel['type'] != 'row']


def rules() -> list[Any]:
    [group] = yaml.safe_load(RULES.read_text('utf-8'))['groups']
    return list(group['rules'])


def expressions() -> Iterator[tuple[str, str]]:
    """Yield each panel, alert or documented query with its PromQL expression."""
    for panel in panels():
        for target in panel['targets']:
            yield panel['title'], target['expr']
    for one in dashboard()['annotations']['list']:
        yield one['name'], one['expr']
    for rule in rules():
        yield rule['alert'], rule['expr']
    page = (ROOT / 'docs' / 'metrics.md').read_text('utf-8')
    yield from re.findall(r'^\| ([^`|]+) \| `(\w+ by [^`]*)` \|$', page, re.MULTILINE)


def test_dashboard_shows_exactly_the_existing_metrics() -> None:
    asked = {
        name for panel in panels() for target in panel['targets']
        for name in METRIC.findall(target['expr'])
    }  # fmt: skip
    assert asked == BY_NAME.keys()


@each('name, expression', list(expressions()))
def test_expressions_fit_their_metrics(name: str, expression: str) -> None:
    """Labels in `by` clauses exist, and counters are not shown as gauges."""
    metrics = [BY_NAME[metric] for metric in METRIC.findall(expression)]
    labels = COMMON.union(*({one.label} for one in metrics if one.label))
    for grouped in re.findall(r'by \(([^)]*)\)', expression):
        assert set(grouped.split(', ')) <= labels, name
    for one in metrics:
        rated = re.search(rf'(rate|increase)\({prometheus_name(one)}\b', expression)
        assert one.kind != 'gauge' or not rated, f'{name}: {one.name} is a gauge'


def test_every_alert_is_documented() -> None:
    text = (ROOT / 'docs' / 'metrics.md').read_text('utf-8')
    section = text.partition('\n## Alerts\n')[2].partition('\n## ')[0]
    explained = re.findall(r'^\| `(Moevement\w+)` \|', section, re.MULTILINE)
    assert explained == [rule['alert'] for rule in rules()]


def test_every_alert_leads_to_its_explanation() -> None:
    for rule in rules():
        address, _, anchor = rule['annotations']['runbook_url'].partition('#')
        repository, _, page = address.partition('/blob/main/')
        assert f"REPOSITORY = '{repository}'" in (ROOT / 'setup.py').read_text('utf-8')
        assert f'## {anchor.capitalize()}\n' in (ROOT / page).read_text('utf-8')


@pytest.mark.skipif(shutil.which('promtool') is None, reason='no promtool (package prometheus)')
@pytest.mark.parametrize('command', [('check', 'rules', 'alerts.yml'),
                                     ('test', 'rules', 'alerts_test.yml')])  # fmt: skip
def test_promtool_accepts_the_rules(command: tuple[str, ...]) -> None:
    ended = subprocess.run(
        ['promtool', *command], cwd=RULES.parent, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
