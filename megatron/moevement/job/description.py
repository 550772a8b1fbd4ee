# SPDX-License-Identifier: Apache-2.0
"""The description of a job in its events, and the loss in upstream's log lines."""

import re
import sys

from megatron.moevement.facts import Counters, JobFacts, Settings
from megatron.moevement.job import computing
from megatron.moevement.job.compatibility.rule import number
from moevement_ext.events import JobDescribed

_LOSS = re.compile(r' lm loss: (\S+) \|')


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


def logged_loss(line: str) -> float | None:
    """The loss in a line of upstream's log, where it is a host number already; None if absent."""
    found = _LOSS.search(line)
    return None if found is None else float(found[1])
