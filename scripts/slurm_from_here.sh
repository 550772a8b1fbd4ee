#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Trains like scripts/slurm_pretrain.sbatch, but launcher and store run on this host, such as a
# login or management node: the job survives the loss of any training node.
#
#   scripts/slurm_from_here.sh --nodes=9 --time=24:00:00 -- <flags of pretrain_gpt.py>
#
# Flags before -- go to salloc; without flags after it the script trains the example of
# scripts/slurm_job.sh. SPARE_NODES (1) of --nodes are spare. The script ends with the job; scancel
# ends both. BEFORE_END (120) seconds before the time limit the workers get SIGTERM, and save with
# --exit-signal-handler.

set -euo pipefail
MOEVEMENT_HOME=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export MOEVEMENT_HOME

allocation=()
while (($#)) && [[ $1 != -- ]]; do
    allocation+=("$1")
    shift
done
command -v salloc >/dev/null || {
    echo "$0: salloc is not in the PATH: run this on a host of the Slurm cluster" >&2
    exit 2
}
# Slurm signals batch scripts and steps, but not programs that salloc runs.
export BEFORE_END=${BEFORE_END:-120}
exec salloc --job-name=moevement --nodes=5 --ntasks-per-node=1 --gpus-per-node=8 \
    --cpus-per-task=96 --mem=0 --exclusive --no-kill "${allocation[@]}" \
    bash "$MOEVEMENT_HOME/scripts/slurm_pretrain.sbatch" "${@:2}"
