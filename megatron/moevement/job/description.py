# SPDX-License-Identifier: Apache-2.0
"""What a job says of itself in its events, and where its loss comes from."""

import re
import sys

from megatron.moevement.counters import Counters
from megatron.moevement.facts import JobFacts, UpstreamArguments
from megatron.moevement.job import computing
from moevement_ext.events import JobDescribed

_LOSS = re.compile(r' lm loss: (\S+) \|')
_PARALLEL = {
    'tensor': 'tensor_model_parallel_size',
    'pipeline': 'pipeline_model_parallel_size',
    'context': 'context_parallel_size',
    'expert': 'expert_model_parallel_size',
}


def describe(args: UpstreamArguments, facts: JobFacts, counters: Counters) -> JobDescribed:
    """The job, from its settings; what a loop of one's own does not name is left out."""
    layout = {kind: getattr(args, name, None) or 1 for kind, name in _PARALLEL.items()}
    on_cpu = facts.distributed_backend == 'gloo'
    return JobDescribed(
        train_iterations=counters.train_iters,
        model=_model(args),
        layout={'ranks': facts.world_size, **layout},
        versions={name: str(found) for name, found in computing.versions(on_cpu).items()},
        command=sys.argv,
    )


def _model(args: UpstreamArguments) -> str:
    named = (
        ('num_layers', '{} layers'),
        ('hidden_size', 'hidden size {}'),
        ('num_experts', '{} experts'),
        ('num_moe_experts', '{} experts'),
        ('moe_router_topk', 'top {}'),
        ('seq_length', 'sequences of {}'),
        ('global_batch_size', '{} of them an iteration'),
    )
    values = ((words, getattr(args, name, None)) for name, words in named)
    return ', '.join(words.format(value) for words, value in values if value)


def logged_loss(line: str) -> float | None:
    """The loss in a line of upstream's log, which has waited for it; None: none is in it."""
    found = _LOSS.search(line)
    return None if found is None else float(found[1])
