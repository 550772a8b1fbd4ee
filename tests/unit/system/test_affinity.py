# SPDX-License-Identifier: Apache-2.0
"""Binding to the CPUs near a GPU, from fake kernel files; no thread is moved."""

import os
from pathlib import Path

import pytest

from moevement_ext.system import process_setup

ADDRESS = '0000:1b:00.0'
NODE = set(range(16))


@pytest.mark.parametrize(
    ('listed', 'allowed', 'bound'),
    [
        ('0-3,8-11\n', NODE, {0, 1, 2, 3, 8, 9, 10, 11}),
        ('4', NODE, {4}),
        ('0-7', {2, 3, 9}, {2, 3}),
        ('0-7', {2, 3}, None),  # already bound by the launcher
        ('0-7', {8, 9}, None),  # the container has none of the listed CPUs
        ('0-15', NODE, None),
        ('\n', NODE, None),  # a virtual machine
        ('near', NODE, None),
        (None, NODE, None),
    ],
)
def test_process_is_bound_to_the_allowed_cpus_near_its_gpu(
    listed: str | None,
    allowed: set[int],
    bound: set[int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if listed is not None:
        (tmp_path / ADDRESS).mkdir()
        (tmp_path / ADDRESS / 'local_cpulist').write_text(listed)
    chosen: list[tuple[int, set[int]]] = []
    monkeypatch.setattr(os, 'sched_getaffinity', lambda process: allowed)
    monkeypatch.setattr(os, 'sched_setaffinity', lambda *given: chosen.append(given))
    assert process_setup.bind(ADDRESS, tmp_path) == bound
    assert chosen == ([] if bound is None else [(0, bound)])


def test_cpu_list_of_this_kernel_is_parsed() -> None:
    assert 0 in process_setup.cpus_in(Path('/sys/devices/system/cpu/present').read_text('ascii'))
