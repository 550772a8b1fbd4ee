# SPDX-License-Identifier: Apache-2.0
r"""Says how a job can be protected, by its flags, without starting it.

    python -m tools.compatibility -- --num-layers 32 --hidden-size 4096 ...
    python -m tools.compatibility --write

After `--` come all flags of pretrain_gpt.py. What upstream itself refuses shows at the start only.
With --write docs/compatibility.md is written anew, which lists all flags: from the lists in
`megatron/moevement/job/compatibility`, from the parser of the installed megatron-core and from what
setup.py and the Dockerfile ask for.

Exit status: 0 the job can be protected, 1 it is refused, 2 a flag is wrong.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron.moevement.job.compatibility.companions import COMPANIONS
from megatron.moevement.job.compatibility.exact import EXACT
from megatron.moevement.job.compatibility.refused import REFUSED
from megatron.moevement.job.compatibility.rule import Group, Rule
from megatron.moevement.job.compatibility.whole_job import WHOLE_JOB
from megatron.moevement.job.compatibility.without_effect import WITHOUT_EFFECT
from moevement_ext.config import LOCALIZED, ConfigurationError
from tools.lab.arguments import Parser
from tools.lab.trainer_flags import parse_trainer_flags, trainer_parser

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / 'docs' / 'compatibility.md'
_WIDTH = 100
_END = '--'
_RECOVERED = {
    True: 'on the stages that lost a worker alone, under a launcher that can (docs/operations.md)',
    False: 'by all workers together, which start again from windows in host memory',
}

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
        'tests/unit/regroup without the backend that fails like NCCL: neither 2.11 nor 2.12 can '
        'have one that is written in Python',
    ),
    (
        'torch 2.14.1, without a GPU',
        '0.19.2',
        '2.20.2',
        'tests/transformer_engine: what shows without its kernels',
    ),
    ('torch 2.12.0a0 of the Dockerfile, NCCL', '0.19.2', 'of the Dockerfile', 'nothing yet'),
)
"""PyTorch and backend, megatron-core, Transformer Engine; what checks them together."""

_HEAD = """# Compatibility

<!-- Written by `python -m tools.compatibility --write`; a change goes into its sources. -->

Every flag of megatron-core 0.19.2 is in one of these lists, by what becomes of a job with
`--sparse-ckpt`. A flag at its default never matters, but for gloo groups beside those of NCCL.

- [Refused](#refused): the job is not started; the message names the flag and what to do instead.
- [Whole job only](#whole-job-only): a failure restarts all workers, which recover together from
  host memory, with the same bits. The log says so at the start.
- [Localized](#localized): only the stages that lost a worker replay; every bit is as if nothing had
  happened. A test shows it, or an argument says why it must be so.
- [With another flag](#with-another-flag): they act only beside one that is listed above.
- [Without effect](#without-effect) on what is trained.
"""

_TRIED = (
    'Each is tried with parsed flags in `tests/unit/megatron/moevement/job/test_unsupported.py`.'
)

_LOCALIZED = (
    'For values that no rule above names. Sequences of different lengths\n'
    '(`TransformerConfig.variable_seq_lengths`, which no flag sets) are among them, up to\n'
    '`--seq-length`, by which the upstream log is sized:\n'
    '`test_sequences_of_different_lengths_are_recovered_locally`.'
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    own = given[: given.index(_END)] if _END in given else given
    parser = Parser(prog='python -m tools.compatibility', description=__doc__)
    parser.add_argument('--write', action='store_true', help='write docs/compatibility.md anew')
    flags = given[len(own) + 1 :]
    if parser.parse_args(own).write == bool(flags):
        parser.error(f'give {_END} and the flags of the job, or --write')
    if flags:
        return _judge(parse_trainer_flags(flags))
    DOCUMENT.write_text(document(), 'utf-8')
    print(f'{DOCUMENT.relative_to(ROOT)} is written.')
    return 0


def _judge(settings: argparse.Namespace) -> int:
    """Print what becomes of a job with these settings; the exit status."""
    # Here, for they import parts of upstream, which comes after the stand-in for a GPU.
    from megatron.moevement.arguments import config_from_args
    from megatron.moevement.job.unsupported import hazard

    refused = [rule for rule in REFUSED if rule.applies(settings)]
    for rule in refused:
        print(f'refused: {rule.shown(settings)}: {rule.remedy}; {rule.reason}')
    if refused:
        return 1
    try:
        config = config_from_args(settings)
    except ConfigurationError as error:
        print(f'refused: {error}')
        return 1
    whole = [rule for rule in WHOLE_JOB if rule.applies(settings)]
    for rule in whole:
        print(f'whole job: {rule.shown(settings)}: {rule.reason}; to avoid it {rule.remedy}')
    danger = hazard(settings)
    if danger:
        print(f'note: {danger}')
    localized = config.recovery == LOCALIZED and not whole
    print(f'protected: a failure is recovered {_RECOVERED[localized]}')
    return 0


def document() -> str:
    """The whole page."""
    flags = flags_of_megatron()
    sections = (
        _HEAD,
        _versions(),
        f'## Refused\n\n{_TRIED}\n\n{_rules(REFUSED)}',
        f'## Whole job only\n\n{_TRIED}\n\n{_rules(WHOLE_JOB)}',
        f'## Localized\n\n{_LOCALIZED}\n\n' + _groups(EXACT, flags),
        '## With another flag\n\n' + _companions(flags),
        '## Without effect\n\n' + '\n'.join(_lists(WITHOUT_EFFECT, flags)),
    )
    return '\n'.join(sections)


def flags_of_megatron() -> dict[str, str]:
    """How a user writes the flag of each setting, from upstream's own parser."""
    parser = trainer_parser()
    return {
        action.dest: next(text for text in action.option_strings if text.startswith('--'))
        for action in reversed(parser._actions)
    }


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
    rows = _table(('PyTorch', 'megatron-core', 'Transformer Engine', 'Checked by'), CHECKED)
    return f'## Versions\n\n{textwrap.fill(text, _WIDTH)}\n\n{rows}'


def _rules(rules: Iterable[Rule]) -> str:
    def condition(rule: Rule) -> str:
        return ' '.join(filter(None, (f'`{rule.flag}`', rule.values.words, rule.when.words)))

    return _table(
        ('Flag', 'Why', 'Instead'), [(condition(rule), rule.reason, rule.remedy) for rule in rules]
    )


def _groups(groups: Iterable[Group], flags: dict[str, str]) -> str:
    rows = [
        (group.title, _named(group.settings, flags), _tests_as_code(group.because))
        for group in groups
    ]
    return _table(('What', 'Flags', 'Shown by'), rows)


def _companions(flags: dict[str, str]) -> str:
    rows = [(f'`{flags[leader]}`', _named(names, flags)) for leader, names in COMPANIONS.items()]
    return _table(('Beside', 'Flags'), rows)


def _lists(groups: Iterable[Group], flags: dict[str, str]) -> Iterator[str]:
    for group in groups:
        text = f'**{group.title.capitalize()}.** {group.because} {_named(group.settings, flags)}'
        yield textwrap.fill(text, _WIDTH, break_on_hyphens=False, break_long_words=False) + '\n'


def _named(settings: Iterable[str], flags: dict[str, str]) -> str:
    return ', '.join(f'`{flags[name]}`' for name in settings)


def _tests_as_code(text: str) -> str:
    return re.sub(r'\btest_\w+(\[[^]]+\])?', r'`\g<0>`', text)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ['---'] * len(head), *rows]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


if __name__ == '__main__':
    raise SystemExit(main())
