# SPDX-License-Identifier: Apache-2.0
"""Configurations of upstream that sparse checkpointing refuses, or recovers as a whole job only.

Reads the rules in `compatibility`. The start of a job says the first that applies;
`megatron/moevement/checking.py` has all of them said, in the same words.
"""

from megatron.moevement.facts import Settings
from megatron.moevement.job.compatibility.precision import (
    FP8,
    keeps_fp8_masters,
    leaves_scales_of_others,
)
from megatron.moevement.job.compatibility.refused_flags import REFUSED
from megatron.moevement.job.compatibility.whole_job_flags import WHOLE_JOB
from moevement_ext.config import ConfigurationError


def refusals(settings: Settings) -> list[str]:
    """Flags with what sparse checkpointing does not capture or replay, and what to do instead."""
    return [
        f'--sparse-ckpt does not support {rule.shown(settings)}: {rule.remedy}; {rule.reason}.'
        for rule in REFUSED
        if rule.applies(settings)
    ]


def refuse_unsupported(settings: Settings) -> None:
    """Refuse what sparse checkpointing does not capture or replay.

    Raises:
        ConfigurationError: naming the flag.
    """
    for refusal in refusals(settings):
        raise ConfigurationError(refusal)


def whole_job_reasons(settings: Settings) -> list[str]:
    """Flags with which localized recovery is not possible, and what to do instead."""
    return [
        f'{rule.shown(settings)}: {rule.reason}; for a localized recovery {rule.remedy}'
        for rule in WHOLE_JOB
        if rule.applies(settings)
    ]


def not_localized(settings: Settings) -> str | None:
    """Why localized recovery is not possible with these flags, None if it is."""
    return next(iter(whole_job_reasons(settings)), None)


def hazard(settings: Settings) -> str | None:
    """What training itself may lose with these flags, None if nothing is known."""
    found = [words for applies, words in _HAZARDS if applies(settings)]
    return '; '.join(found) or None


def _has_fp8_moments(settings: Settings) -> bool:
    names = ('exp_avg_dtype', 'exp_avg_sq_dtype')
    narrow = any(str(settings.get(name)) in FP8 for name in names)
    return narrow and not keeps_fp8_masters(settings)  # there Adam is told what to do


_HAZARDS = (
    (
        _has_fp8_moments,
        'moments in fp8 become NaN if all gradients of a parameter are zero in its first step, as '
        'those of an expert without tokens; use fp16 or bf16 unless every expert is used',
    ),
    (
        keeps_fp8_masters,
        'with masters in fp8 updates that are small beside a weight are lost; compare the losses '
        'with those of --main-params-dtype fp16 (python -m tools.bench.precision)',
    ),
    (
        leaves_scales_of_others,
        'with --fp8-recipe delayed and --fp8-param-gather upstream, by its source, leaves the '
        'scale of a weight as it was on data-parallel ranks that own no part of it; compare the '
        'losses with those of a single data-parallel rank',
    ),
)
"""When, and what to say."""
