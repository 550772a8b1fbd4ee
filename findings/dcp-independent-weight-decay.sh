#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torch 2.14.1 with emerging-optimizers 0.3.0.
# Guess: a job that loads its model, then its optimizer, goes on with the weights that were saved.
# Seen: all weights are smaller by the weight decay, 0.9 of what was saved. To create the state of a
# fresh optimizer, torch.distributed.checkpoint runs a step of it with lr = 0 and zero gradients. A
# weight decay of the kind "independent" does not depend on lr. get_optimizer_state_dict of a fresh
# optimizer does the same, so a first save changes the model as well. (That such a step also moves
# the step count of Adam is known: pytorch issue 164929.) Load the model last.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3.12 -m venv "$place"
"$place/bin/pip" install --quiet torch==2.14.1 emerging-optimizers==0.3.0
"$place/bin/python" -W ignore - <<'PYTHON' 2>/dev/null | tee "$place/seen"
import copy

import torch
from emerging_optimizers.orthogonalized_optimizers import Muon
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict as set_model
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict as set_optimizer


def build(method):
    model = torch.nn.Linear(8, 8, bias=False)
    return model, Muon(model.parameters(), weight_decay=0.1, weight_decay_method=method)


for method in ('decoupled', 'independent'):
    model, optimizer = build(method)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    model, optimizer = build(method)  # the job starts again
    set_model(model, weights)
    set_optimizer(model, optimizer, state)
    print(method, f'{(model.weight / weights["weight"]).mean().item():.3f} of the saved weights')
PYTHON
diff "$place/seen" - <<'EXPECTED'
decoupled 1.000 of the saved weights
independent 0.900 of the saved weights
EXPECTED
