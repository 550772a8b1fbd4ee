# SPDX-License-Identifier: Apache-2.0
"""Selection by names on the command line and by changed files."""

import subprocess
from pathlib import Path

import pytest

from tests.suite import selection
from tests.suite.__main__ import main
from tests.suite.phases import Phase
from tests.suite.selection import ROOT, UnknownName, reach, with_paths

UNIT = ROOT / 'tests' / 'unit'


def test_folder_or_file_is_found_by_its_name() -> None:
    assert with_paths(['recover']) == ['tests/unit/recover']
    assert with_paths(['layout']) == [
        'tests/unit/capture/test_layout.py',
        'tests/unit/tools/plan/test_layout.py',
    ]
    assert with_paths(['rank_state', '-k', 'recover']) == [
        'tests/unit/recover/test_rank_state.py',
        '-k',
        'recover',
    ]


def test_paths_and_cases_are_unchanged() -> None:
    path = 'tests/unit/recover/test_verdict.py'
    assert with_paths([path, f'{path}::test_x']) == [path, f'{path}::test_x']
    assert with_paths(['test_rank_state.py::test_x']) == [
        'tests/unit/recover/test_rank_state.py::test_x'
    ]


def test_options_alone_select_all_tests() -> None:
    assert with_paths(['-k', 'verdict', '-x']) == ['-k', 'verdict', '-x', 'tests']


def test_help_lists_the_flags_of_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(['--help'])
    assert '--since REV' in capsys.readouterr().out


def test_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownName, match='recovery_of_nothing'):
        with_paths(['recovery_of_nothing'])


def test_reach_includes_indirect_imports() -> None:
    found = reach(UNIT / 'recover' / 'test_verdict.py')
    assert ROOT / 'moevement_ext' / 'recover' / 'verdict.py' in found
    assert ROOT / 'moevement_ext' / 'errors.py' in found, 'not directly'
    assert ROOT / 'tests' / 'conftest.py' not in found, 'or any change would touch all'
    assert ROOT / 'tools' / 'demo' / '__main__.py' not in found


@pytest.mark.parametrize(
    ('changed', 'touched', 'not_touched'),
    [
        (
            'moevement_ext/recover/verdict.py',
            'recover/test_verdict.py',
            'plan/test_byte_planner.py',
        ),
        ('moevement_ext/recover/verdict.py', '../distributed/test_torchrun.py', 'readable.py'),
        ('tools/plan/sizes.py', 'tools/plan/test_sizes.py', 'recover/test_verdict.py'),
        ('tools/plot_run.py', 'test_design.py', '../distributed/test_torchrun.py'),
        ('scripts/slurm_job.sh', 'test_repository.py', 'recover/test_verdict.py'),
        ('tests/unit/regroup/ranks.py', 'regroup/test_nccl.py', 'recover/test_verdict.py'),
        ('setup.py', 'recover/test_verdict.py', 'readable.py'),
    ],
)
def test_change_touches_the_tests_that_reach_it(
    changed: str, touched: str, not_touched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (ROOT / changed).exists()
    monkeypatch.setattr(selection, '_changed_since', lambda revision: [changed])
    found = {path.resolve() for path in selection.touched_by('HEAD')}
    assert (UNIT / touched).resolve() in found
    assert (UNIT / not_touched).resolve() not in found


def test_changes_include_the_working_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        names = ['-c', 'user.name=a', '-c', 'user.email=a@b']
        subprocess.run(['git', *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git('init')
    (tmp_path / 'committed').write_text('1')
    (tmp_path / 'same').write_text('1')
    git('add', '.')
    git('commit', '-m', 'x')
    (tmp_path / 'committed').write_text('2')
    (tmp_path / 'new').write_text('2')
    monkeypatch.setattr(selection, 'ROOT', tmp_path)
    assert set(selection._changed_since('HEAD')) == {'committed', 'new'}
    with pytest.raises(UnknownName, match='--since nothing'):
        list(selection._changed_since('nothing'))


def test_phase_without_touched_tests_is_skipped() -> None:
    phase = Phase('some', ('tests/unit/suite',))
    assert phase.files(None) == ['tests/unit/suite']
    assert phase.files(set()) == []
    here = Path(__file__)
    assert phase.files({here, UNIT / 'test_names.py'}) == [str(here.relative_to(ROOT))]
