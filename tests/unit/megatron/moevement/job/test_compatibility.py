# SPDX-License-Identifier: Apache-2.0
"""Rules name flags that there are, each once, and the page has them."""

import argparse
import importlib.metadata
from collections import Counter

from megatron.moevement.job.compatibility.refused_flags import REFUSED
from megatron.moevement.job.compatibility.whole_job_flags import WHOLE_JOB
from megatron.moevement.seams import cpu_device
from tools import compatibility

cpu_device.install()

from megatron.training.arguments import add_megatron_arguments  # noqa: E402

LONGEST_PAGE = 120


def options() -> dict[str, list[str]]:
    """How the flag of each setting can be written, from upstream's parser."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        found.setdefault(action.dest, []).extend(action.option_strings)
    return found


def test_nothing_is_said_twice() -> None:
    for rules in (REFUSED, WHOLE_JOB):
        ruled = Counter(rule.setting for rule in rules)
        assert not [name for name, count in ruled.items() if count > 1]


def test_rules_have_flags_as_a_user_writes_them() -> None:
    """One that upstream drops is to be taken off."""
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


def test_what_the_tests_run_on_is_among_the_versions() -> None:
    installed = [
        importlib.metadata.version(name).partition('+')[0] for name in ('torch', 'megatron-core')
    ]
    assert any(
        installed == [row[0].split()[1].rstrip(','), row[1]] for row in compatibility.CHECKED
    )
