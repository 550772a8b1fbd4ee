# SPDX-License-Identifier: Apache-2.0
"""Rules name existing flags, once each, and the page lists them."""

import argparse
import importlib.metadata
from collections import Counter

from megatron.moevement.job.flags import REFUSED, WHOLE_JOB
from megatron.moevement.seams import cpu_device
from tools import compatibility

cpu_device.install()

from megatron.training.arguments import add_megatron_arguments  # noqa: E402

from megatron.moevement.arguments import add_arguments  # noqa: E402

LONGEST_PAGE = 135


def options() -> dict[str, list[str]]:
    """Spellings of the flag of each setting, from upstream's parser with our flags."""
    parser = add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        found.setdefault(action.dest, []).extend(action.option_strings)
    return found


def test_each_setting_has_at_most_one_rule() -> None:
    for rules in (REFUSED, WHOLE_JOB):
        ruled = Counter(rule.setting for rule in rules)
        assert not [name for name, count in ruled.items() if count > 1]


def test_rules_name_flags_of_the_parser() -> None:
    """A rule for a flag that upstream drops must be deleted."""
    written = options()
    for rule in (*REFUSED, *WHOLE_JOB):
        assert rule.flag in written.get(rule.setting, ()), rule.flag


def test_page_is_up_to_date_and_short() -> None:
    """If not: `python -m tools.compatibility --write`."""
    page = compatibility.DOCUMENT.read_text('utf-8')
    assert page == compatibility.document()
    assert len(page.splitlines()) < LONGEST_PAGE


def test_page_names_every_flag_with_a_rule() -> None:
    page = compatibility.document()
    assert not [rule.flag for rule in (*REFUSED, *WHOLE_JOB) if f'`{rule.flag}`' not in page]


def test_installed_versions_are_listed_as_checked() -> None:
    installed = [
        importlib.metadata.version(name).partition('+')[0] for name in ('torch', 'megatron-core')
    ]
    assert any(
        installed == [row[0].split()[1].rstrip(','), row[1]] for row in compatibility.CHECKED
    )
