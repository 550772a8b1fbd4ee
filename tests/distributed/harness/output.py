# SPDX-License-Identifier: Apache-2.0
"""Parses the output of a job for comparisons: upstream's log lines, and metrics."""

import re
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.distributed.harness.cluster import Cluster


def upstream_lines(job: Cluster, attempt: int) -> list[str]:
    """Upstream's iteration and validation lines, without clock times and durations."""
    lines = [
        line
        for line in job.output(attempt).splitlines()
        if re.search(r'\] iteration +\d+/|validation loss at', line)
    ]
    assert lines
    return [re.sub(r'^ \[.*?\]|elapsed time per iteration \(ms\): [\d.]+', '', x) for x in lines]


def scraped(port: int) -> dict[tuple[str, ...], float]:
    """Values by name, rank and further labels, as a scraper reads them; empty if nothing serves."""
    try:
        with urllib.request.urlopen(f'http://127.0.0.1:{port}', timeout=5) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return {}
    common = ('run', 'node', 'rank')
    return {
        (
            sample.name,
            sample.labels['rank'],
            *(value for name, value in sample.labels.items() if name not in common),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
