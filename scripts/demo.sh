#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Kills one of two emulated nodes of a training job: only its pipeline stage is replayed, and the
# job ends with the same bits as an undisturbed one. No GPU needed.
#
#   scripts/demo.sh [--iterations 40] [--kill-after 28] [--window 6] [--output runs/demo]

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup_env.sh
exec .venv/bin/python -m tools.demo "$@"
