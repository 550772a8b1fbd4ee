# SPDX-License-Identifier: Apache-2.0
"""The description of a job in its events, and the loss in upstream's log lines."""

import math
import re
import sys
from collections.abc import Container

from megatron.moevement.facts import Counters, JobFacts, Settings
from megatron.moevement.job import computing
from megatron.moevement.job.compatibility.rule import number
from moevement_ext.events import JobDescribed

_LOSS_NAME = 'lm loss'
_LOSS = re.compile(rf' {_LOSS_NAME}: (\S+) \|')
_ITERATION = re.compile(r'\] iteration +\d+/')


def describe(settings: Settings, facts: JobFacts, counters: Counters) -> JobDescribed:
    """The job's description from its settings; a custom loop lacks some of them."""
    sizes = {
        'tensor': facts.tensor_model_parallel_size,
        'pipeline': facts.pipeline_model_parallel_size,
        'context': facts.context_parallel_size,
        'expert': number(settings, 'expert_model_parallel_size', 1),
    }
    on_cpu = facts.distributed_backend == 'gloo'
    return JobDescribed(
        train_iterations=counters.train_iters,
        model=_model(settings),
        layout={'ranks': facts.world_size, **sizes},
        versions={name: str(found) for name, found in computing.versions(on_cpu).items()},
        command=sys.argv,
    )


def _model(settings: Settings) -> str:
    named = (
        ('num_layers', '{} layers'),
        ('hidden_size', 'hidden size {}'),
        ('num_experts', '{} experts'),
        ('num_moe_experts', '{} experts'),
        ('moe_router_topk', 'top {}'),
        ('seq_length', 'sequences of {}'),
        ('global_batch_size', '{} of them an iteration'),
    )
    values = ((words, settings.get(name)) for name, words in named)
    return ', '.join(words.format(value) for words, value in values if value)


def logged_loss(line: str, sums: Container[str]) -> float | None:
    """The loss in a line of upstream's log, where it is a host number already; None if absent.

    `sums` has the names that upstream has summed up. Upstream leaves out a loss that is not a
    number, so that its absence means NaN, unless all iterations so far were skipped.
    """
    found = _LOSS.search(line)
    if found is not None:
        return float(found[1])
    return math.nan if _LOSS_NAME in sums and _ITERATION.search(line) else None
