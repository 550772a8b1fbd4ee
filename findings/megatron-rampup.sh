#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# megatron-core 0.19.2, torch 2.14.1, no GPU.
# Guess: --rampup-batch-size 16 16 96 with --global-batch-size 64 begins with batches of 16 samples,
# as its help text says, which calls it deprecated, and --step-batch-size-schedule its successor.
# Seen: all batches have 64 samples. The parser takes the flag, nothing reads it, and nothing is said.
# A job that moves to this release trains with other batches from its first iteration on.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3.12 -m venv "$place"
"$place/bin/pip" install --quiet torch==2.14.1 megatron-core==0.19.2
cat >"$place/batches.py" <<'PYTHON'
import sys

import torch
from megatron.core import num_microbatches_calculator as batches
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_global_variables

torch.cuda.get_device_capability = lambda *_: (9, 0)  # the rules ask for it; no GPU is used
schedule = sys.argv[1]
sys.argv += '--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8'.split()
sys.argv += '--max-position-embeddings 8 --train-iters 9 --lr 1 --micro-batch-size 1'.split()
args = parse_args()
validate_args(args)
set_global_variables(args, build_tokenizer=False)
consumed, sizes = 0, []
for _ in range(4):
    batches.update_num_microbatches(consumed)
    sizes.append(batches.get_current_global_batch_size())
    consumed += sizes[-1]
print(schedule, *sizes, file=sys.stderr)
PYTHON
batches() {
    "$place/bin/python" -W ignore "$place/batches.py" "$@" 2>&1 >/dev/null | tail -1
}
{
    batches --rampup-batch-size 16 16 96 --global-batch-size 64
    batches --step-batch-size-schedule '0:16 256:32 512:64' # in tokens
} | tee "$place/seen"
diff "$place/seen" - <<'EXPECTED'
--rampup-batch-size 64 64 64 64
--step-batch-size-schedule 16 16 32 64
EXPECTED
