#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Lint, types and tests, in consecutive phases; ends with a summary.
#
#   scripts/test.sh                               # all, as CI
#   scripts/test.sh --thorough [--shard 1/3]      # also nearly redundant cases, and campaigns
#   scripts/test.sh recover -k torn               # tests of a folder or file; options are pytest's
#
# --record writes the durations of test files, which balance the shards. With names or options of
# pytest no linters run.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh

# One thread per process: the distributed tests start many processes, and bit-exact comparisons need
# a fixed order of summation. Compilation would not pay off here.
export OMP_NUM_THREADS=1
export TORCHDYNAMO_DISABLE=1
# Without cached bytecode, each process would compile its imports, and pytest rewrite all tests.
unset PYTHONDONTWRITEBYTECODE

exec .venv/bin/python -m tests.suite "$@"
