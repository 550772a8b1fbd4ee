# SPDX-License-Identifier: Apache-2.0
"""The list of flags is whole, its claims name tests that exist, and the page has it."""

import argparse
import importlib.metadata
import re
from collections import Counter
from pathlib import Path

from megatron.moevement.job.compatibility.companions import COMPANIONS
from megatron.moevement.job.compatibility.exact import EXACT
from megatron.moevement.job.compatibility.refused import REFUSED
from megatron.moevement.job.compatibility.rule import Group
from megatron.moevement.job.compatibility.whole_job import WHOLE_JOB
from megatron.moevement.job.compatibility.without_effect import WITHOUT_EFFECT
from megatron.moevement.seams import cpu_device
from tools import compatibility

cpu_device.install()

from megatron.training.arguments import add_megatron_arguments  # noqa: E402

ROOT = Path(__file__).resolve().parents[5]
RULES = (*REFUSED, *WHOLE_JOB)


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
            assert not case or any(f"'{case}'" in text for text in sources), case


# ---- the page


def test_page_is_up_to_date() -> None:
    """If not: `python -m tools.compatibility --write`."""
    assert compatibility.DOCUMENT.read_text('utf-8') == compatibility.document()


def test_what_the_tests_run_on_is_among_the_versions() -> None:
    installed = [
        importlib.metadata.version(name).partition('+')[0] for name in ('torch', 'megatron-core')
    ]
    assert any(
        installed == [row[0].split()[1].rstrip(','), row[1]] for row in compatibility.CHECKED
    )
