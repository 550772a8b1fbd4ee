#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torch 2.14.1, elastic torchrun (c10d rendezvous, 1 to 2 nodes).
# Guess: TORCHELASTIC_RESTART_COUNT, by the documentation "the number of worker group restarts so
# far", is 1 in the second life of a worker.
# Seen: it stays 0 if the workers are restarted because a node joins. A program that loads its last
# checkpoint or appends to its log only if the variable is above 0 starts over.
set -euo pipefail
place=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$place"' EXIT
python3.12 -m venv "$place"
"$place/bin/pip" install --quiet torch==2.14.1
cat >"$place/worker.py" <<'PYTHON'
import os
import sys
import time

nodes, count = os.environ['WORLD_SIZE'], os.environ['TORCHELASTIC_RESTART_COUNT']
if os.environ['AGENT'] == 'first':
    with open(sys.argv[1], 'a') as lives:
        lives.write(f'{nodes} nodes, restart count {count}\n')
time.sleep(5 if nodes == '2' else 600)
PYTHON
agent() {
    # With a shared store, a node that joins on this machine waits for an address in vain.
    exec env AGENT="$1" TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
        "$place/bin/torchrun" --nnodes 1:2 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint "127.0.0.1:$port" --rdzv-conf last_call_timeout=2 \
        "$place/worker.py" "$place/seen" 2>/dev/null
}
port=$("$place/bin/python" -c \
    "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
agent first &
until [[ -s $place/seen ]]; do sleep 0.2; done
(agent second)
wait
diff "$place/seen" - <<'EXPECTED'
1 nodes, restart count 0
2 nodes, restart count 0
EXPECTED
cat "$place/seen"
