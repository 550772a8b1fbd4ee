# SPDX-License-Identifier: Apache-2.0
"""Writes docs/compatibility.md: flags of Megatron that exclude protection or localized recovery.

    python -m tools.compatibility --write

The sources are `flag_rules.toml` and `flags.toml` in `megatron/moevement/job`, `compatibility.toml`
here, and the requirements in setup.py and the Dockerfile. Without --write the page is printed. To
check the flags of one job, use `moevement check`.
"""

import re
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.moevement.job.flag_rules import REFUSED, WHOLE_JOB, Rule
from megatron.moevement.job.flags import NO_BIT

from .flags import ROOT, write_pages
from .lab.tables import markdown

DOCUMENT = ROOT / 'docs' / 'compatibility.md'
_WIDTH = 100

_TEXTS = tomllib.loads(Path(__file__).with_suffix('.toml').read_text('utf-8'))
CHECKED: list[list[str]] = _TEXTS['checked']
"""PyTorch and backend, megatron-core, Transformer Engine, and the tests of this combination."""


def main(argv: Sequence[str] | None = None) -> int:
    return write_pages('compatibility', __doc__, argv, {DOCUMENT: document})


def document() -> str:
    notes = '\n\n'.join(textwrap.fill(_TEXTS[name], _WIDTH) for name in ('lengths', 'sends'))
    return '\n'.join(
        (
            _TEXTS['head'],
            f'## Refused\n\n{_rules(REFUSED)}',
            f'## Whole job only\n\n{notes}\n\n{_rules(WHOLE_JOB)}',
            f'## May differ\n\n{_indifferent()}',
            _versions(),
        )
    )


def _versions() -> str:
    setup = (ROOT / 'setup.py').read_text('utf-8')
    image = re.search(r'^ARG BASE_IMAGE=(\S+)', (ROOT / 'Dockerfile').read_text('utf-8'), re.M)
    needed = re.findall(r"'((?:torch|megatron-core)[<>=][^']*)'", setup)
    python = re.search(r"python_requires='([^']+)'", setup)
    assert image and python and len(needed) == 2
    text = (
        f'Needed: Python {python[1]}, {", ".join(f"`{one}`" for one in needed)}. The Dockerfile '
        f'is built on `{image[1]}`. At its start a job compares the parts of megatron-core that it '
        'replaces with those it was written for, and ends with their names if they differ.'
    )
    rows = markdown(
        ('PyTorch', 'megatron-core', 'Transformer Engine', 'Checked by'), _TEXTS['checked']
    )
    return f'## Versions\n\n{textwrap.fill(text, _WIDTH)}\n\n{rows}'


def _rules(rules: Iterable[Rule]) -> str:
    """A row for each reason, with all its flags."""
    rows: dict[str, list[Rule]] = {}
    for rule in rules:
        rows.setdefault(rule.reason, []).append(rule)
    cells = [
        (', '.join(map(_condition, alike)), why, _remedies(alike)) for why, alike in rows.items()
    ]
    return markdown(('Flag', 'Why', 'Instead'), cells)


def _indifferent() -> str:
    """A row for each reason why settings change no bit, with the flags that upstream has."""
    rows = (
        (about, ', '.join(f'`{one}`' for one in names.split())) for about, names in NO_BIT.items()
    )
    return markdown(('About', 'Settings'), rows)


def _condition(rule: Rule) -> str:
    return ' '.join(filter(None, (f'`{rule.flag}`', rule.values.words, rule.when.words)))


def _remedies(rules: Sequence[Rule]) -> str:
    """The remedies; where rules with one reason differ, with the flags of each remedy."""
    flags: dict[str, list[str]] = {}
    for rule in rules:
        flags.setdefault(rule.instead, []).append(f'`{rule.flag}`')
    if len(flags) == 1:
        return next(iter(flags))
    return '; '.join(f'{", ".join(named)}: {remedy}' for remedy, named in flags.items())


if __name__ == '__main__':
    raise SystemExit(main())
