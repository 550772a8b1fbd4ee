# SPDX-License-Identifier: Apache-2.0
"""The list of flags is whole, its claims name tests that give these flags, and the page has it."""

import argparse
import importlib.metadata
import re
from collections import Counter
from pathlib import Path

import pytest

from megatron.moevement.job.compatibility.companions import COMPANIONS
from megatron.moevement.job.compatibility.exact import EXACT
from megatron.moevement.job.compatibility.refused import REFUSED
from megatron.moevement.job.compatibility.rule import Group
from megatron.moevement.job.compatibility.whole_job import WHOLE_JOB
from megatron.moevement.job.compatibility.without_effect import WITHOUT_EFFECT
from megatron.moevement.seams import cpu_device
from tests.distributed import test_compatibility as combinations
from tests.distributed import test_fp8 as fp8
from tests.distributed import test_localized_recovery as localized
from tests.distributed import test_masters as masters
from tests.distributed import test_precision as precision
from tests.distributed import test_unequal_stages as unequal
from tests.distributed import test_whole_job_recovery as whole
from tests.distributed.conftest import MODEL, TRAINING
from tools import compatibility

cpu_device.install()

from megatron.training.arguments import add_megatron_arguments  # noqa: E402

ROOT = Path(__file__).resolve().parents[5]
RULES = (*REFUSED, *WHOLE_JOB)

# Flags of each case of a test, by the name of the test.
TRIED = {
    'test_flags_that_are_recovered_locally': {
        name: flags for name, (_, flags) in combinations.CASES.items()
    },
    'test_lost_stage_comes_back_with_the_bits_of_a_fault_free_run': {
        name: flags for name, (flags, _, _) in localized.LAYOUTS.items()
    },
    'test_replacement_has_the_parameter_groups_of_the_lost_worker': {
        name: flags for name, (flags, _) in unequal.CASES.items()
    },
    'test_low_precision_state_is_recovered': precision.CASES,
    'test_computation_in_fp8_is_recovered': fp8.CASES,
    'test_weights_in_fp8_with_narrow_masters_are_recovered': masters.CASES,
    'test_recovered_run_has_the_bits_of_a_fault_free_run': {
        name: setup[0] for name, setup in whole.SETUPS.items()
    },
}


def options() -> dict[str, list[str]]:
    """How the flag of each setting can be written, from upstream's parser."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        found.setdefault(action.dest, []).extend(action.option_strings)
    return found


def listed() -> Counter[str]:
    """How often a setting is in the lists that say what it does."""
    groups = [group.settings for group in (*EXACT, *WITHOUT_EFFECT)]
    return Counter(name for names in (*groups, *COMPANIONS.values()) for name in names)


def test_list_has_every_flag_of_megatron_and_no_other() -> None:
    ruled = {rule.setting for rule in RULES}
    assert listed().keys() | ruled == options().keys()


def test_nothing_is_said_twice() -> None:
    assert not [name for name, count in listed().items() if count > 1]
    for rules in (REFUSED, WHOLE_JOB):
        ruled = Counter(rule.setting for rule in rules)
        assert not [name for name, count in ruled.items() if count > 1]
    recovered = {name for group in EXACT for name in group.settings}
    assert not (listed().keys() & {rule.setting for rule in RULES}) - recovered


def test_companions_stand_by_a_rule() -> None:
    assert COMPANIONS.keys() <= {rule.setting for rule in RULES}


def test_rules_have_flags_as_a_user_writes_them() -> None:
    written = options()
    for rule in RULES:
        assert rule.flag in written[rule.setting]


# ---- what shows it


def named_tests(group: Group) -> list[tuple[str, str]]:
    """(test, case, if there is one) that a group gives as its reason."""
    return re.findall(r'\b(test_\w+)(?:\[([^]]+)\])?', group.because)


def test_every_claim_has_a_test_or_an_argument() -> None:
    for group in EXACT:
        assert named_tests(group) or group.because.startswith(('By reasoning', 'All tests'))


def test_tests_that_are_named_exist() -> None:
    sources = [path.read_text('utf-8') for path in (ROOT / 'tests').rglob('test_*.py')]
    defined = {name for text in sources for name in re.findall(r'def (test_\w+)\(', text)}
    for group in EXACT:
        for test, case in named_tests(group):
            assert test in defined
            assert not case or case in TRIED[test]


@pytest.mark.parametrize(
    'group', [g for g in EXACT if any(case for _, case in named_tests(g))], ids=lambda g: g.title
)
def test_cases_give_the_flags_that_they_stand_for(group: Group) -> None:
    written = options()
    ((test, case),) = named_tests(group)
    flags = {*MODEL, *TRAINING, *TRIED[test][case].split()}
    for setting in group.settings:
        assert flags & set(written[setting]), setting


def test_every_combination_stands_for_flags() -> None:
    named = {case for group in EXACT for _, case in named_tests(group)}
    assert combinations.CASES.keys() <= named


# ---- the page


def test_page_is_up_to_date() -> None:
    """If not: `python -m tools.compatibility`."""
    assert compatibility.DOCUMENT.read_text('utf-8') == compatibility.document()


def test_what_the_tests_run_on_is_among_the_versions() -> None:
    installed = [
        importlib.metadata.version(name).partition('+')[0] for name in ('torch', 'megatron-core')
    ]
    assert any(
        installed == [row[0].split()[1].rstrip(','), row[1]] for row in compatibility.CHECKED
    )
