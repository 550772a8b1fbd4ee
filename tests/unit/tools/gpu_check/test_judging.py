# SPDX-License-Identifier: Apache-2.0
"""What the stages of the GPU check accept, and what they name."""

import ast
import itertools
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moevement_ext.events import ProtectionReduced, Recovered, WorkerStarted
from tests.unit.tools.samples import event
from tools.gpu_check import copies, four_rank, nccl, nccl_rank, one_rank, own_tests, stages
from tools.gpu_check.__main__ import _LIMIT_S
from tools.gpu_check.nccl_rank import Measured
from tools.gpu_check.training import compare, costs, reduced
from tools.lab.digests import StateDigest
from tools.lab.evidence import Recovery, Tier
from tools.lab.run_log import Captured, Iteration, RunLog
from tools.lab.trained import Trained, newest_pids

ROOT = Path(__file__).resolve().parents[4]

GOOD_PROBE: dict[str, Any] = {
    'pinned_gb_s': 50.0,
    'registered_gb_s': 49.0,
    'busy_over_limit': 0.96,
    'identical': True,
    'small_copy': {'beside': {'p99_ms': 1.4}},
}


@pytest.mark.parametrize(
    ('figures', 'problem'),
    [
        ({'registered_gb_s': 40.0}, 'registered tmpfs reach 0.80 of pinned'),
        ({'busy_over_limit': 0.80}, 'captures reach 0.80 of one large copy into pinned memory'),
        ({'identical': False}, 'what was captured is not the state'),
        ({'small_copy': {'beside': {'p99_ms': 9.0}}}, 'waits 9.0 ms'),
    ],
)
def test_copies_are_judged_by_pinned_bandwidth(figures: dict[str, Any], problem: str) -> None:
    assert copies.judge(GOOD_PROBE) == []
    (found,) = copies.judge({**GOOD_PROBE, **figures})
    assert problem in found


def test_costs_of_windows_are_judged_by_their_goals() -> None:
    assert one_rank.judge_costs({'plain_ms': 200.0, 'exposed_ms': 2.0}) == []
    (found,) = one_rank.judge_costs({'plain_ms': 200.0, 'exposed_ms': 3.0})
    assert found == 'with window auto 1.5% of an iteration are exposed, more than 1 %'


@pytest.mark.parametrize(
    ('name', 'without_engine'), [('transformer-engine', False), ('recorded', True)]
)
def test_stage_runs_where_its_needs_are_met(
    name: str, without_engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(gpu: bool, engine: bool) -> bool:
        spec = lambda name: object() if engine else None  # noqa: E731
        monkeypatch.setattr('importlib.util.find_spec', spec)
        return name in stages.possible(gpu)

    assert [found(True, True), found(True, False)] == [True, without_engine]
    assert not found(False, True)


@pytest.mark.parametrize('new', [True, False])
def test_recorded_stage_is_left_out_for_older_torch(
    new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream warns of it, and the failure would be of its own."""
    name = 'set_override_stale_capture_stream'
    monkeypatch.setattr(torch.autograd.graph, name, None, raising=False)
    if not new:
        monkeypatch.delattr(torch.autograd.graph, name)
    assert ('recorded' in stages.possible(gpu=True)) is new
    assert name in stages.STAGES['recorded'].needs


def test_dry_run_omits_the_stages_of_a_gpu() -> None:
    precisions = {f'precision-c{number}' for number in range(1, 6)}
    left_out = set(stages.STAGES) - set(stages.possible(gpu=False))
    assert left_out == {'recorded', 'transformer-engine', *precisions}


def measured(cycle: int, rank: int, pid: int, **resources: float) -> Measured:
    still = dict.fromkeys(('descriptors', 'threads', 'memory_mib', 'gpu_used_mib'), 10.0)
    return Measured(cycle, rank, pid, 'returned', '', '', 0, 0.1, 0.2, {**still, **resources})


def test_only_growth_within_a_process_is_drift() -> None:
    attempts = [
        measured(0, 0, 1),
        measured(1, 0, 1, descriptors=12.0, memory_mib=90.0),  # what libraries keep
        measured(2, 0, 1, descriptors=14.0, memory_mib=90.0),
        measured(0, 1, 2, threads=10.0),
        measured(2, 1, 3, threads=90.0),  # the process that took its place
    ]
    drift = nccl.worst_drift(attempts)
    assert drift == {'descriptors': 2.0, 'threads': 0.0, 'memory_mib': 0.0, 'gpu_used_mib': 0.0}
    assert nccl.judge(drift) == [], 'some sockets of NCCL come and go'
    assert nccl.judge({**drift, 'descriptors': 5.0, 'threads': 1.0}) == [
        'descriptors grew by 5',
        'threads grew by 1',
    ]


@pytest.mark.parametrize(
    ('threads', 'counted'), [([12, 11, 10, 10, 9], 10), (itertools.count(12), 12)]
)
def test_threads_that_are_about_to_end_are_no_drift(
    threads: Iterable[int], counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of replaced groups; not waited for any longer if the number never stays."""
    monkeypatch.setattr(nccl_rank, '_UNCHANGED_S', 0.0)
    monkeypatch.setattr(nccl_rank, '_SETTLED_S', 60.0 if counted == 10 else 0.0)
    rank: Any = object.__new__(nccl_rank.Rank)
    rank._process_groups = SimpleNamespace(await_destruction=lambda: None)
    left = iter(threads)
    rank._resources = lambda: {'threads': float(next(left))}
    assert rank._settled_resources() == {'threads': counted}


def trained(digest: str = 'a', **fields: Any) -> Trained:
    attempts = [[Iteration(float(n), n, 100.0 if n < 4 else 50.0, 5.0) for n in range(1, 6)]]
    log = RunLog(attempts, [Captured(n, 2, 64, 9.0 if n < 4 else 0.5) for n in range(1, 6)])
    state = StateDigest(digest, 8, {'0': {'master/w': digest}})
    return Trained(log, state, **{'events': [], 'recovery': None, **fields})


def test_states_and_costs_are_compared() -> None:
    plain = trained()
    assert compare(plain, trained(), 'killed') == []
    (problem,) = compare(plain, trained('b'), 'killed')
    assert problem == 'killed: the final state differs in master'
    assert costs(plain, trained()) == {
        'plain_ms': 50.0,
        'windows_ms': 50.0,
        'windows_over_plain': 1.0,
        'exposed_ms': 0.5,
    }
    less = [event(ProtectionReduced, rank, 1.0, reason='full') for rank in (0, 1)]
    assert reduced(trained(events=less)) == ['protection was reduced: full']


def back(tier: Tier, *stages_and_replayed: tuple[list[int], int]) -> Trained:
    events = [
        event(Recovered, rank, 1.0, scope='localized', stages=stages, replayed=replayed)
        for rank, (stages, replayed) in enumerate(stages_and_replayed)
    ]
    return trained(events=events, recovery=Recovery(tier, 1.0, 9, 4, 1))


def test_only_the_lost_stage_replays() -> None:
    kept, lost = ([1], 0), ([1], 4)
    assert four_rank.not_localized(back(Tier.LOCALIZED, kept, kept, lost, lost)) == []
    for wrong, problem in (
        (trained(), 'from nothing'),
        (back(Tier.WHOLE_JOB, kept, kept, lost, lost), 'from whole_job'),
        (back(Tier.LOCALIZED, lost, kept, lost, lost), 'rank 0 replayed 4'),
        (back(Tier.LOCALIZED, kept, kept, lost, kept), 'rank 3 replayed 0'),
        (back(Tier.LOCALIZED, kept, kept, ([0, 1], 4), lost), 'stages [0, 1] rolled back'),
    ):
        (found,) = four_rank.not_localized(wrong)
        assert problem in found


def test_workers_of_a_job_that_is_over_are_known() -> None:
    """Agents of torchrun know none any more, and the job would seem not to have recovered."""
    lives = [(0, 10), (1, 11), (0, 12)]
    events = [event(WorkerStarted, rank, 1.0, pid=pid) for rank, pid in lives]
    assert newest_pids(events) == [12, 11]


def marks(node: ast.AST) -> list[str]:
    return [
        ast.unparse(inner)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) == 'pytest.mark.skipif'
    ]


def reasons_to_skip(file: Path) -> Iterator[tuple[str, set[str], list[str]]]:
    """Each test, its markers, and what skips it besides that there is no GPU at all."""
    tree = ast.parse(file.read_text('utf-8'))
    everywhere = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == 'pytestmark'
    ]
    for test in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
        nodes = [*everywhere, *test.decorator_list]
        markers = set(re.findall(r'pytest\.mark\.(\w+)', ' '.join(map(ast.unparse, nodes))))
        conditions = [skip for node in nodes for skip in marks(node)]
        reasons = [text for text in conditions if 'not torch.cuda.is_available()' not in text]
        reasons += re.findall(r'pytest\.(?:importorskip|skip)\(.*', ast.unparse(test))
        yield f'{file.name}: {test.name}', markers, reasons


def test_every_test_that_may_be_skipped_on_a_gpu_is_left_out_by_a_marker() -> None:
    known = set(own_tests.deselected(0, lambda module: False))
    files = sorted((ROOT / 'tests' / 'gpu').glob('test_*.py'))
    found = [one for file in files for one in reasons_to_skip(file)]
    skipped = {name for name, _, reasons in found if reasons}
    assert len(skipped) >= 3
    unknown = [name for name, markers, reasons in found if len(reasons) > len(markers & known)]
    assert not unknown
    used = {marker for _, markers, reasons in found for marker in markers & known if reasons}
    assert used == known


def test_tests_of_available_hardware_are_kept() -> None:
    assert own_tests.deselected(2, lambda module: True) == []
    assert own_tests.deselected(1, lambda module: True) == ['two_gpus']
    assert own_tests.deselected(2, lambda module: module != 'pynvml') == ['nvml']


HANGS = """
import ctypes

def test_that_waits_where_no_signal_reaches_it():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


def test_a_test_that_hangs_is_named_long_before_the_stage_must_end(tmp_path: Path) -> None:
    hanging = tmp_path / 'test_hanging.py'
    hanging.write_text(HANGS)
    command = own_tests.command([hanging], tmp_path / 'results.xml', [], longest_s=2)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert 'in test_that_waits_where_no_signal_reaches_it' in done.stdout + done.stderr
    assert 2 * own_tests._LONGEST_S < _LIMIT_S / 2, 'both runs, and what else the stage does'


def test_counts_of_all_suites_of_a_result_file_are_summed() -> None:
    suite = '<testsuite tests="5" failures="1" errors="0" skipped="2"/>'
    counts = own_tests.counts(f'<testsuites>{suite}{suite}</testsuites>')
    assert counts == {'tests': 10, 'failures': 2, 'errors': 0, 'skipped': 4}
