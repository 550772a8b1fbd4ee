# SPDX-License-Identifier: Apache-2.0
"""Stages are run, kept and skipped; their results are those of one machine."""

import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest

from tests.unit.tools.samples import HARDWARE
from tools.gpu_check.__main__ import main, run_apart, summary
from tools.gpu_check.report import NAME, Report, Settings, StageResult, load, save
from tools.lab.errors import LabError
from tools.lab.launch import PROGRAM

pytestmark = pytest.mark.timed

PASSED = StageResult(True, 3.2, {'gb_s': 51.234567, 'gpu': 'X', 'table': {'a': 1}}, [])
FAILED = StageResult(False, 61.0, {}, ['a sum was wrong', 'and another'])


def test_summary_has_a_line_for_each_stage() -> None:
    lines = summary(Report(HARDWARE, True, {'copies': PASSED, 'nccl': FAILED})).splitlines()
    assert lines[0] == f'gpu_check on a DRY RUN, without a GPU, on {HARDWARE.line()}'
    assert lines[1:] == [
        '---- environment (not run)',
        'PASS copies (3 s) gb_s=51.23 gpu=X',
        '---- tests (not run)',
        'FAIL nccl (61 s)',
        '     a sum was wrong',
        '     and another',
        '---- one-rank (not run)',
        '---- recorded (not run: no GPU, or torch lacks set_override_stale_capture_stream)',
        '---- transformer-engine (not run: no transformer_engine)',
        *(f'---- precision-c{n} (not run: no transformer_engine)' for n in range(1, 6)),
        '---- four-rank (not run)',
        'localized recovery over gloo: not shown',
        'exposed time of windows: not shown',
        'copies against pinned bandwidth: not shown',
        'not run: environment, tests, one-rank, recorded, transformer-engine, precision-c1, '
        'precision-c2, precision-c3, precision-c4, precision-c5, four-rank',
    ]


SHOWN = {
    'copies': {
        'registered_gb_s_1': 52.04, 'pinned_gb_s_1': 53.0, 'registered_gb_s_8': 52.0,
        'pinned_gb_s_8': 53.0, 'busy_over_limit_1': 0.971, 'busy_over_limit_8': 0.98,
    },
    'one-rank': {'plain_ms': 700.0, 'exposed_ms': 7.0, 'auto_exposed_ms': 1.4},
    'four-rank': {'came_back': 'localized'},
}  # fmt: skip


@pytest.mark.parametrize(
    ('passed', 'came_back', 'exact'),
    [
        (True, 'localized', 'exact'),
        (False, 'localized', 'NOT exact, or not clean: 3 differ'),
        (False, 'whole_job', 'not shown: the lost rank came back by whole_job'),
    ],
)
def test_summary_ends_with_the_three_main_results(passed: bool, came_back: str, exact: str) -> None:
    figures = {**SHOWN, 'four-rank': {'came_back': came_back}}
    problems = [] if passed else ['3 differ']
    stages = {name: StageResult(passed, 1.0, found, problems) for name, found in figures.items()}
    *_, localized, exposed, copied, last = summary(Report(HARDWARE, False, stages)).splitlines()
    assert localized == f'localized recovery over NCCL: {exact}'
    assert exposed == (
        'exposed time of windows: 7.00 ms of 700.0 ms an iteration (1.00%) with a fixed window, '
        '1.40 ms of 700.0 ms an iteration (0.20%) with window auto'
    )
    assert copied == (
        'copies against pinned bandwidth: 52.0 of 53.0 GB/s, captures during compute 0.97 of it, '
        'with connections=1; 52.0 of 53.0 GB/s, captures during compute 0.98 of it, with '
        'connections=8'
    )
    assert last.startswith('not run: environment, tests')


def test_results_are_kept_for_this_machine_alone(tmp_path) -> None:
    here = Report(HARDWARE, False, {}, 'a GPU', 'this code')

    def other(**fields: object) -> Report:
        return msgspec.structs.replace(here, **fields)

    save(tmp_path, load(tmp_path, here).with_stage('nccl', FAILED))
    busier = other(hardware=msgspec.structs.replace(HARDWARE, load_average=9.0))
    report = load(tmp_path, busier).with_stage('copies', PASSED)
    assert (report.passed('copies'), report.passed('nccl'), report.passed('tests')) == (
        True,
        False,
        False,
    )
    for elsewhere in (
        other(hardware=msgspec.structs.replace(HARDWARE, gpu='H200')),
        other(dry_run=True),
        other(gpu_id='another of its model'),
    ):
        with pytest.raises(LabError, match='has results of a processor.*another --output'):
            load(tmp_path, elsewhere)
    (tmp_path / NAME).write_text('{')
    with pytest.raises(LabError, match='damaged'):
        load(tmp_path, here)


def test_results_of_other_software_do_not_count(tmp_path, capsys, monkeypatch) -> None:
    """Else a check after `git pull` passes without having run anything."""
    before = Report.here(gpu=False)
    save(tmp_path, before.with_stage('copies', PASSED))
    assert load(tmp_path, Report.here(gpu=False)).passed('copies')
    for changed in (('ROOT', tmp_path), ('installed', lambda package: '1')):
        with monkeypatch.context() as patched:
            (tmp_path / PROGRAM).touch()
            patched.setattr(f'tools.gpu_check.report.{changed[0]}', changed[1])
            assert load(tmp_path, Report.here(gpu=False)).stages == {}
        assert 'results of other code or libraries: all stages run' in capsys.readouterr().out


@pytest.mark.parametrize('folder', ['gpu', 'stand_ins', 'transformer_engine'])
def test_a_changed_test_is_other_software(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr('tools.gpu_check.report.ROOT', tmp_path)
    (tmp_path / PROGRAM).touch()
    file = tmp_path / 'tests' / folder / 'test_rules.py'
    file.parent.mkdir(parents=True)
    file.touch()
    before = Report.here(gpu=False).software
    file.write_text('changed = True')
    assert Report.here(gpu=False).software != before


def test_without_a_gpu_nothing_is_claimed(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    assert main(['--output', str(tmp_path)]) == 2
    assert 'there is no CUDA device here' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_a_stage_is_run_apart_kept_and_not_run_again(tmp_path, capfd) -> None:
    passed = dict.fromkeys(('environment', 'copies', 'nccl', 'one-rank', 'four-rank'), PASSED)
    command = ['--cpu', '--output', str(tmp_path)]
    here = Report.here(gpu=False)
    save(tmp_path, here.with_stage('nccl', FAILED))
    assert main([*command, '--stage', 'tests']) == 0  # all are skipped, in a process of its own
    assert 'FAIL nccl' in capfd.readouterr().out
    found = msgspec.json.decode((tmp_path / NAME).read_bytes(), type=Report)
    assert (
        found.stages['tests'].figures['skipped_1'] == found.stages['tests'].figures['tests_1'] > 5
    )
    save(tmp_path, msgspec.structs.replace(here, stages={**found.stages, **passed}))
    assert main(command) == 0
    assert capfd.readouterr().out.count('has passed already') == 6


def test_a_stage_that_takes_too_long_is_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr('tools.gpu_check.__main__._LIMIT_S', 0.5)
    before = set(psutil.Process().children())  # servers of other tests
    result = run_apart('tests', Settings(tmp_path, tmp_path, gpu=False))
    assert result.problems == ['it was not done within 0.5 s']
    assert set(psutil.Process().children()) <= before


def test_interrupted_stage_keeps_its_findings(tmp_path) -> None:
    so_far = tmp_path / 'tests-so-far.json'
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run_apart, 'tests', Settings(tmp_path, tmp_path, gpu=False))
        while not (so_far.exists() or running.done()):
            time.sleep(0.01)
        (stage,) = (
            child
            for child in psutil.Process().children()
            if child.status() != psutil.STATUS_ZOMBIE and str(so_far) in child.cmdline()
        )
        stage.terminate()
        result = running.result()
    assert not result.passed
    assert result.figures.keys() == {'left_out'}
    assert result.problems == ['it ended with exit status 143; its last lines say why']
    assert list(tmp_path.iterdir()) == [tmp_path / 'tests']
