#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# torch 2.14.1, TCPStore with its default server (libuv) and the older one (use_libuv=False).
# Guess: `wait(keys)` returns once all keys are set, by the documentation "waits for each key in
# keys to be added to the store", and raises at its timeout otherwise.
# Seen: with the default server it returns at once when another client calls `compare_set` on the
# missing key with another expected value, which sets nothing. With the older server it raises. A
# program that takes the return for an arrival passes a barrier at which no rank has arrived.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3.12 -m venv "$place"
"$place/bin/pip" install --quiet torch==2.14.1
cat >"$place/store.py" <<'PYTHON'
import threading
import time
from datetime import timedelta

from torch.distributed import DistStoreError, TCPStore


def wait(store: TCPStore) -> None:
    try:
        store.wait(['arrived'], timedelta(seconds=5))
    except DistStoreError:
        print('wait raised at its timeout')
    else:
        print('wait returned, key set:', store.check(['arrived']))


for libuv in (True, False):
    server = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    client = TCPStore('127.0.0.1', server.port, is_master=False, use_libuv=libuv)
    waiting = threading.Thread(target=wait, args=(client,))
    waiting.start()
    time.sleep(1)
    assert server.compare_set('arrived', 'before', 'after') == b'before'
    waiting.join()
PYTHON
"$place/bin/python" "$place/store.py" 2>/dev/null >"$place/seen"
diff "$place/seen" - <<'EXPECTED'
wait returned, key set: False
wait raised at its timeout
EXPECTED
cat "$place/seen"
