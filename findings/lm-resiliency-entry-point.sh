#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# lm-resiliency 0.2.0 with torch 2.13.0, a release that it supports.
# Guess: a package that registers a rendezvous back end can be selected by torchrun.
# Seen: torch calls the entry point without arguments and expects a factory; this one is the factory
# itself. Every process that imports torch.distributed.run logs a traceback, and the back end is not
# registered. An entry point that returns the function mends it.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3.12 -m venv "$place"
"$place/bin/pip" install --quiet torch==2.13.0 lm-resiliency==0.2.0
"$place/bin/python" -c 'import torch.distributed.run' 2>&1 | tee "$place/seen"
grep -q "TypeError: create_rendezvous_handler() missing 1 required positional argument: 'params'" \
    "$place/seen"
