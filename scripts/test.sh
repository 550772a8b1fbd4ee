#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Lint, types and tests. Arguments go to pytest: scripts/test.sh -k planner
#
# Without any, or with --thorough alone, tests/unit runs beside those that train: it waits for
# a good part of its time, and they have precedence. What it printed comes last.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh

# One thread a process: the distributed tests start many processes, and bit-exact comparisons
# need a fixed order of summation. Nothing here is worth compiling.
export OMP_NUM_THREADS=1
export TORCHDYNAMO_DISABLE=1

run() {
    printf '\n[test] %s\n' "$*"
    local start=$SECONDS
    "$@" || return
    printf '[test] passed in %s s\n' "$((SECONDS - start))"
}

python=.venv/bin/python
sources=(setup.py moevement_ext megatron tools examples tests scripts/local_cluster.py)
if [[ -f pretrain_gpt.py ]]; then
    sources+=(pretrain_gpt.py)
fi

run "$python" -m black --check "${sources[@]}"
run "$python" -m isort --check-only "${sources[@]}"
run "$python" -m ruff check "${sources[@]}"
run "$python" -m mypy moevement_ext megatron/moevement tools examples

pytest=("$python" -u -m pytest --durations=15 "$@")
if [[ $# -gt 0 && $* != --thorough ]]; then
    run "${pytest[@]}" tests
    exit
fi
printed=$(mktemp)
nice "${pytest[@]}" -p no:cacheprovider tests/unit >"$printed" 2>&1 &
units=$!
trap 'kill "$units" 2>/dev/null || true; rm -f "$printed"' EXIT
status=0
own=(tests/gpu tests/transformer_engine)  # the others run without either
run "${pytest[@]}" tests --ignore=tests/unit "${own[@]/#/--ignore=}" || status=$?
run "${pytest[@]}" "${own[@]}" || status=$?
units_status=0
wait "$units" || units_status=$?
printf '\n[test] tests/unit\n'
cat "$printed"
printf '[test] tests/unit ended with exit status %s\n' "$units_status"
exit "$((status ? status : units_status))"
