# SPDX-License-Identifier: Apache-2.0
"""Writes docs/flags.md, all flags of sparse checkpointing, and the fields in docs/api.md.

    python -m tools.flags --write

The page is generated from the parser, and the tables of fields from the classes; texts are in
the metadata of fields (`moevement_ext/config.py`). Without --write the page is printed.
"""

import argparse
import dataclasses
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from megatron.moevement.arguments import add_arguments
from megatron.moevement.job.declared import TrainingPlan
from moevement_ext.config import SparseCheckpointConfig

from .lab.programs import Parser
from .lab.tables import markdown

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / 'docs' / 'flags.md'
API = ROOT / 'docs' / 'api.md'

_TEXTS = tomllib.loads(Path(__file__).with_suffix('.toml').read_text('utf-8'))
MORE: dict[str, str] = _TEXTS['more']
"""Where the pages say more about a flag."""
_OTHERS = (
    'Besides these, workers read those of torchrun (`RANK`, ...), of Slurm (`SLURM_JOB_ID`, ...), '
    'and\nof the libraries that [may decide bits](start.md#run-id-and-identity).'
)
_DEFAULT = re.compile(r' ?Default: (.*)\.$')


def main(argv: Sequence[str] | None = None) -> int:
    pages = {DOCUMENT: document, API: lambda: with_fields(API.read_text('utf-8'))}
    return write_pages('flags', __doc__, argv, pages)


def write_pages(
    name: str, about: str, argv: Sequence[str] | None, pages: Mapping[Path, Callable[[], str]]
) -> int:
    """A program that writes pages with `--write`, or prints the first one."""
    parser = Parser(prog=f'python -m tools.{name}', description=about)
    parser.add_argument('--write', action='store_true', help='write what else is printed')
    if not parser.parse_args(argv).write:
        sys.stdout.write(next(iter(pages.values()))())
        return 0
    for path, text in pages.items():
        path.write_text(text(), 'utf-8')
    print(f'written: {" ".join(str(path.relative_to(ROOT)) for path in pages)}')
    return 0


def document() -> str:
    known, groups = {row[0]: row for row in rows()}, []
    for title, names in _TEXTS['groups'].items():
        listed = (known.pop(f'`--sparse-ckpt{name and "-"}{name}`') for name in names)
        groups.append(f'## {title}\n\n{markdown(("Flag", "Default", "Meaning"), listed)}')
    page = _TEXTS['head'] + '\n'.join(groups)
    assert not known, f'flags.toml: no group has {", ".join(known)}'
    went = [(f'`--sparse-ckpt-{name}`', decides) for name, decides in _TEXTS['went'].items()]
    page += f'\n## Flags that went\n\n{markdown(("Flag", "What decides now"), went)}'
    variables = [
        (f'`{name}`', setter, about)
        for setter, group in _TEXTS['variables'].items()
        for name, about in group.items()
    ]
    heads = 'Variable', 'Set by', 'Meaning'
    return f'{page}\n## Environment variables\n\n{_OTHERS}\n\n{markdown(heads, variables)}'


def with_fields(page: str) -> str:
    """Return a page with new tables of fields, each below the comment that names its class."""
    for kind in (TrainingPlan, SparseCheckpointConfig):
        head = re.search(rf'<!-- fields of {kind.__name__}\b.*\n\n\|.*\n\| -.*\n', page)
        assert head is not None, kind.__name__
        table = ''.join(f'| {" | ".join(row)} |\n' for row in fields(kind))
        page = page[: head.end()] + table + re.sub(r'\A(\|.*\n)*', '', page[head.end() :])
    return page


def fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each field of a dataclass."""
    assert dataclasses.is_dataclass(kind)
    for field in filter(lambda field: 'help' in field.metadata, dataclasses.fields(kind)):
        yield f'`{field.name}`', _shown(field.default), _code(field.metadata['help'])


def _shown(value: object) -> str:
    if value is dataclasses.MISSING:
        return 'must be given'
    if isinstance(value, timedelta):
        return f'`timedelta(seconds={value.total_seconds():g})`'
    return f'`{value!r}`'.replace(f'-{os.geteuid()}', '-<uid>')


def rows() -> Iterator[tuple[str, str, str]]:
    """Flag, default and meaning of each flag, in the order of the parser."""
    for action in add_arguments(argparse.ArgumentParser(add_help=False))._actions:
        flag = action.option_strings[0]
        meaning = _DEFAULT.sub('', (action.help or '').replace('%%', '%'))
        if flag in MORE:
            meaning += f' [More]({MORE[flag]}).'
        yield f'`{flag}`', default(action), _code(meaning)


def default(action: argparse.Action) -> str:
    """The default of a flag: its value, or the words of the help text."""
    if action.default is False:
        return 'off'
    if action.default is not None:
        return f'`{action.default}`'.replace(f'-{os.geteuid()}', '-<uid>')
    found = _DEFAULT.search(action.help or '')
    return _code(found[1]) if found else 'none'


def _code(text: str) -> str:
    """Flags, variables and quoted values of a help text as code."""
    return re.sub(r'--[a-z][\w-]*\w|\b[A-Z]+(?:_[A-Z]+)+\b|\btools\.\w+', r'`\g<0>`', text)


if __name__ == '__main__':
    raise SystemExit(main())
