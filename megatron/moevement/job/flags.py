# SPDX-License-Identifier: Apache-2.0
"""All that is known about flags of Megatron, with the reason: what each means to a recovery.

- A flag with a rule in `flag_rules.toml` excludes sparse checkpointing, or only its localized
  recovery, with some values. A flag without a rule allows a localized recovery with equal bits.
- Every flag counts for the identity of the run (`job/identity.py`), so no job resumes from windows
  of another value, unless it is listed as one that cannot change a bit, or belongs to the layout.

The start of a job reports the first rule that applies; `checking` reports all, in the same words.
A new flag of upstream counts until it is known to have no effect on bits, and needs a rule only
once it is found to break recovery. `docs/compatibility.md` is generated from that file and
`flags.toml` (`python -m tools.compatibility --write`).
"""

import tomllib
from pathlib import Path

import megatron.core

from megatron.moevement.facts import Settings
from megatron.moevement.job.computing import release_of
from megatron.moevement.job.flag_rules import (
    FP8,
    REFUSED,
    WHOLE_JOB,
    keeps_fp8_masters,
    leaves_scales_of_others,
)
from megatron.moevement.seams.patches import CHECKED_VERSION
from moevement_ext.config import ConfigurationError

_TABLES = tomllib.loads(Path(__file__).with_suffix('.toml').read_text('utf-8'))
NO_BIT: dict[str, str] = _TABLES['no_bit']
"""Settings that change no bit of training, by what they are about."""
LAYOUT = frozenset(_TABLES['layout'].split())
"""Settings of the parallel layout, which has a digest of its own."""
MAY_CHANGE = frozenset(_TABLES['may_change'].split())
"""Settings of the run that decide how a layout works, not what is trained."""
INDIFFERENT = frozenset(' '.join((*NO_BIT.values(), _TABLES['progress'])).split())
"""All settings that do not count."""


def counts(name: str) -> bool:
    """True unless a setting cannot change what training computes, or belongs to the layout."""
    return name not in INDIFFERENT | LAYOUT and not name.startswith('sparse_ckpt')


def refusals(settings: Settings) -> list[str]:
    """Flags with state that sparse checkpointing does not capture or replay, each with a remedy."""
    return [
        f'--sparse-ckpt does not support {rule.shown(settings)}: {rule.instead}; {rule.reason}.'
        for rule in REFUSED
        if rule.applies(settings)
    ]


def refuse_unsupported(settings: Settings) -> None:
    """Refuse flags with state that sparse checkpointing does not capture or replay.

    Raises:
        ConfigurationError: the message names the first such flag.
    """
    for refusal in refusals(settings):
        raise ConfigurationError(refusal)


def whole_job_reasons(settings: Settings) -> list[str]:
    """Flags that exclude a localized recovery, each with a remedy."""
    return [
        f'{rule.shown(settings)}: {rule.reason}; for a localized recovery {rule.instead}'
        for rule in WHOLE_JOB
        if rule.applies(settings)
    ]


def not_localized(settings: Settings) -> str | None:
    """The first reason that excludes a localized recovery; None if there is none."""
    return next(iter(whole_job_reasons(settings)), None)


def hazard(settings: Settings) -> str | None:
    """Effects by which these flags may harm training itself; None if none is known."""
    found = [words for applies, words in _HAZARDS if applies(settings)]
    return '; '.join(found) or None


def _has_fp8_moments(settings: Settings) -> bool:
    names = ('exp_avg_dtype', 'exp_avg_sq_dtype')
    narrow = any(str(settings.get(name)) in FP8 for name in names)
    return narrow and not keeps_fp8_masters(settings)  # fp8 masters tell Adam how to round


def _is_unchecked(_settings: Settings) -> bool:
    release = str(megatron.core.__version__).partition('+')[0]  # without a commit
    return not CHECKED_VERSION.endswith(f' {release}')


_RELEASE = ' in '.join(map(str, release_of('megatron-core').values()))
# Pairs of predicate and message.
_HAZARDS = (
    (
        _is_unchecked,
        f'only {CHECKED_VERSION} was checked, not {_RELEASE}, in which a part may keep its name '
        'but change its meaning; rehearse a failure first (moevement drill)',
    ),
    (
        _has_fp8_moments,
        'moments in fp8 become NaN if all gradients of a parameter are zero in its first step, as '
        'those of an expert without tokens; use fp16 or bf16 unless every expert is used',
    ),
    (
        keeps_fp8_masters,
        'with masters in fp8 updates that are small relative to a weight are lost; compare losses '
        'with those of --main-params-dtype fp16 (moevement bench overhead --precision all)',
    ),
    (
        leaves_scales_of_others,
        'with --fp8-recipe delayed and --fp8-param-gather upstream by its source code leaves the '
        'scale of a weight as it was on data-parallel ranks that own no part of it; compare the '
        'losses with those of a single data-parallel rank',
    ),
)
