#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Lint, types and tests, in phases one after the other; a summary comes last.
#
#   scripts/test.sh                               # all, as CI
#   scripts/test.sh --thorough [--shard 1/3]      # also what others nearly cover, and campaigns
#   scripts/test.sh --since HEAD~1                # what the change since then can touch
#   scripts/test.sh recover -k torn               # tests of a folder or file; options are pytest's
#
# --record writes how long the test files took, by which shards are balanced. With names or
# pytest's options no linters run.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh

# One thread a process: the distributed tests start many processes, and bit-exact comparisons
# need a fixed order of summation. Nothing here is worth compiling.
export OMP_NUM_THREADS=1
export TORCHDYNAMO_DISABLE=1

exec .venv/bin/python -m tests.suite "$@"
