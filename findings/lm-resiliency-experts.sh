#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# lm-resiliency 0.2.0 with megatron-core 0.18.2 and torch 2.13.0, releases that it supports.
# Guess: a model with expert parallelism is saved as any other.
# Seen: Megatron then has a chain of two optimizers, and the first save ends with an AssertionError:
# the adapter reads a property that allows a single optimizer. (hasattr does not help: the property
# raises no AttributeError.) A function that lists all of them is in the same file.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3.12 -m venv "$place"
"$place/bin/pip" install --quiet torch==2.13.0 megatron-core==0.18.2 lm-resiliency==0.2.0
"$place/bin/python" -W ignore - <<'PYTHON' 2>/dev/null | tee "$place/seen"
import torch
from lm_resiliency.integrations.megatron.adapter import MegatronAdapter
from megatron.core.optimizer.optimizer import ChainedOptimizer


class One:
    config, model_chunks = None, []

    def __init__(self):
        self.optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


for count in (1, 2):
    chain = ChainedOptimizer([One() for _ in range(count)])
    adapter = MegatronAdapter([torch.nn.Linear(2, 2)], chain)
    try:
        print(count, len(adapter.collect_checkpoint_tensors()), 'tensors')
    except AssertionError as error:
        print(count, error)
PYTHON
diff "$place/seen" - <<'EXPECTED'
1 3 tensors
2 ChainedOptimizer has more than one optimizer when accessing self.optimizer
EXPECTED
