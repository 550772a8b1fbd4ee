#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# megatron-core 0.19.2, torch 2.14.1, no GPU.
# Guess: --async-save copies the state before training goes on, also that of tensors on the CPU.
# Seen: only a view of a larger storage is copied. Any other CPU tensor goes to the writer as it is:
# an update before the writer has read it changes the checkpoint, which then has tensors of two
# iterations, without an error. GPU tensors are copied.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3.12 -m venv "$place"
"$place/bin/pip" install --quiet torch==2.14.1 megatron-core==0.19.2
cat >"$place/save.py" <<'PYTHON'
import sys

import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint import DefaultSavePlanner

if __name__ == '__main__':  # the writer starts a process
    state = {'exp_avg': torch.zeros(3), 'view': torch.zeros(6)[:3]}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    writer = FileSystemWriterAsync(sys.argv[1])
    plan = writer.prepare_local_plan(planner.create_local_plan())
    (plan,) = writer.prepare_global_plan([plan])
    writer.prepare_write_data(plan, planner)
    for tensor in state.values():
        tensor.add_(1)  # the next update, before anything is written
    for _, _, (_, tensors) in writer.write_buckets:
        for item, tensor in tensors:
            print(item.index.fqn, tensor.tolist())
PYTHON
"$place/bin/python" -W ignore "$place/save.py" "$place/checkpoint" 2>/dev/null | tee "$place/seen"
diff "$place/seen" - <<'EXPECTED'
exp_avg [1.0, 1.0, 1.0]
view [0.0, 0.0, 0.0]
EXPECTED
