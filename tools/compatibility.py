# SPDX-License-Identifier: Apache-2.0
"""Writes docs/compatibility.md: flags of Megatron that exclude protection or localized recovery.

    python -m tools.compatibility --write

The sources are `megatron/moevement/job/flags.py`, and the requirements in
setup.py and the Dockerfile. Without --write the page is printed. To check the flags of one job, use
`moevement check`.
"""

import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.moevement.job.flag_rules import Rule
from megatron.moevement.job.flags import NO_BIT, REFUSED, WHOLE_JOB

from .lab.arguments import Parser
from .lab.tables import markdown

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / 'docs' / 'compatibility.md'
_WIDTH = 100

CHECKED = (
    ('torch 2.15.0, gloo', '0.19.2', 'none', 'all tests but `tests/gpu`, on the CPU'),
    ('torch 2.14.1, gloo', '0.19.2', 'none', 'all tests but `tests/gpu`, on the CPU'),
    (
        'torch 2.12.0, gloo',
        '0.19.2',
        'none',
        'by hand: `test_localized_recovery.py`, `test_whole_job_recovery.py` and '
        '`test_refusals.py`. It is the release nearest to the torch in the image that the '
        'Dockerfile names, which calls itself 2.12.0a0',
    ),
    (
        'torch 2.11.0, gloo',
        '0.19.2',
        'none',
        'by hand: `pretrain_gpt.py --help`, a localized recovery, one of the whole job, and '
        'tests/unit/regroup without the backend that fails like NCCL: neither 2.11 nor 2.12 '
        'supports backends that are written in Python',
    ),
    (
        'torch 2.14.1, without a GPU',
        '0.19.2',
        '2.20.2',
        'tests/transformer_engine: all rules that can be checked without its kernels',
    ),
    ('torch 2.12.0a0 of the Dockerfile, NCCL', '0.19.2', 'of the Dockerfile', 'nothing yet'),
)
"""PyTorch and backend, megatron-core, Transformer Engine, and the tests of this combination."""

_HEAD = """# Compatibility

<!-- Written by `python -m tools.compatibility --write`; a change goes into its sources. -->

Flags of megatron-core 0.19.2 that `--sparse-ckpt` does not fully support:

- [Refused](#refused): the job is not started; the message names the flag and what to do instead.
- [Whole job only](#whole-job-only): a failure restarts all workers, which recover together from
  host memory, with the same bits. The log says so at the start.

With all others only the stages that lost a worker replay, and every bit is as if nothing had
happened. Without `--untie-embeddings-and-output-weights` the first and the last pipeline stage
share weights, and replay together if one of them lost a worker: with two stages, that is the whole
job. Every flag is part of the run's identity, including flags that a later Megatron adds: a job
that is started with another value finds its windows refused, by the name of the flag.
[Some](#may-differ) cannot change a bit, and may differ from start to start.

`moevement check -- <flags>` reports how a job with these flags would be treated, without
starting it.
"""

_LENGTHS = (
    'Sequences of different lengths (`TransformerConfig.variable_seq_lengths`, which no flag sets) '
    'are recovered locally up to `--seq-length`, by which the upstream log is sized.'
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog='python -m tools.compatibility', description=__doc__)
    parser.add_argument('--write', action='store_true', help='write docs/compatibility.md')
    if not parser.parse_args(argv).write:
        sys.stdout.write(document())
        return 0
    DOCUMENT.write_text(document(), 'utf-8')
    print(f'{DOCUMENT.relative_to(ROOT)} is written.')
    return 0


def document() -> str:
    return '\n'.join(
        (
            _HEAD,
            f'## Refused\n\n{_rules(REFUSED)}',
            f'## Whole job only\n\n{textwrap.fill(_LENGTHS, _WIDTH)}\n\n{_rules(WHOLE_JOB)}',
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
    rows = markdown(('PyTorch', 'megatron-core', 'Transformer Engine', 'Checked by'), CHECKED)
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
    return markdown(
        ('About', 'Settings'),
        [
            (about, ', '.join(f'`{name}`' for name in names.split()))
            for about, names in NO_BIT.items()
        ],
    )


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
