#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Common part of the batch scripts: the launcher, and default flags of the program. Variables:
#
#   MOEVEMENT_HOME  the checkout, on a shared file system (default: where sbatch is called)
#   PYTHON          runs the launcher on the batch host (its .venv/bin/python)
#   AGENT_PYTHON    runs agents and workers on the nodes (the same); may begin with a wrapper
#   STEP_FLAGS      more flags of the srun that starts the agents
#   GRACE           seconds from the signal before the time limit to SIGKILL of the workers (90)
#
# In an image, with the checkout at the same path inside (both examples also mount /dev/shm):
#
#   pyxis:     AGENT_PYTHON="env python" STEP_FLAGS="--container-image=IMAGE \
#                  --container-mounts=$PWD:$PWD --container-workdir=$PWD"
#   apptainer: AGENT_PYTHON="apptainer exec --nv --bind $PWD IMAGE.sif python"

# train [flags of the launcher] -- [flags of pretrain_gpt.py, else those of the example]
train() {
    local launch=()
    while [[ $1 != -- ]]; do
        launch+=("$1")
        shift
    done
    shift
    local flags=("$@")
    if (($# == 0)); then
        example
    fi
    surroundings
    # The launcher replaces this shell, so that signals of Slurm reach it.
    exec "$PYTHON" -m moevement_ext.command slurm --workers-per-node "$(gpus_per_node)" \
        ${STEP_FLAGS:+"--step-flags=$STEP_FLAGS"} ${AGENT_PYTHON:+"--agent-python=$AGENT_PYTHON"} \
        ${GRACE:+--grace "$GRACE"} \
        "${launch[@]}" -- pretrain_gpt.py "${flags[@]}"
}

# Slurm sets one variable on nodes of the job, salloc the other on its host. Values: 8, or h100:8.
gpus_per_node() {
    local asked=${SLURM_GPUS_PER_NODE:-1}
    echo "${SLURM_GPUS_ON_NODE:-${asked##*:}}"
}

# Prints the words of a variable, one per line; quotes keep words together, as in the launcher.
words() {
    xargs -rn1 printf '%s\n' <<< "$1"
}

# Sets the environment of all programs of a job.
surroundings() {
    local home=${MOEVEMENT_HOME:-$PWD}
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
    export PYTHONPATH=$home${PYTHONPATH:+:$PYTHONPATH}
    export PYTHON=${PYTHON:-$home/.venv/bin/python}
}

# Sets `flags`: a 16-expert MoE GPT on 4 nodes of 8 GPUs.
#
#   DATA_PREFIX=/data/text CHECKPOINTS=/ckpt/run7 sbatch scripts/slurm_pretrain.sbatch
example() {
    # Written by moevement prepare-data --output-prefix data/text
    local data_prefix=${DATA_PREFIX:-$PWD/data/text}
    local checkpoints=${CHECKPOINTS:-$PWD/checkpoints/$SLURM_JOB_NAME}
    local parallel model training data protection logging

    # One pipeline stage per node.
    parallel=(
        --pipeline-model-parallel-size 4
        --expert-model-parallel-size 8
        --tensor-model-parallel-size 1
        --use-distributed-optimizer
        --overlap-grad-reduce
        --disable-gloo-process-groups  # survivors of a failure reconnect groups of one kind
        --distributed-timeout-minutes 10
    )

    model=(
        --num-layers 32
        --hidden-size 2048
        --ffn-hidden-size 5632
        --num-attention-heads 16
        --seq-length 4096
        --max-position-embeddings 4096
        --position-embedding-type rope
        --normalization RMSNorm
        --swiglu
        --disable-bias-linear
        --untie-embeddings-and-output-weights
        --num-experts 16
        --moe-router-topk 2
        --moe-router-load-balancing-type aux_loss
        --moe-aux-loss-coeff 1e-2
        --moe-token-dispatcher-type alltoall
        --moe-grouped-gemm
    )

    training=(
        --bf16
        --deterministic-mode  # recovery is then exact to the bit
        --micro-batch-size 1
        --global-batch-size 512
        --train-iters 50000
        --lr 3e-4
        --min-lr 3e-5
        --lr-decay-style cosine
        --lr-warmup-iters 500
        --weight-decay 0.1
        --clip-grad 1.0
        --seed 1234
    )

    # The flags that moevement prepare-data printed.
    data=(
        --data-path "$data_prefix"
        --tokenizer-type NullTokenizer
        --vocab-size 257
        --split '98,2,0'
    )

    # Sparse checkpoints go to host memory in every iteration. Dense checkpoints go to disk, rarely,
    # for losses that host memory cannot recover, and before the time limit of the job. The next job
    # with the same CHECKPOINTS resumes from disk, or, identified by the name of the run, from the
    # memory of nodes that it gets again.
    protection=(
        --sparse-ckpt
        --sparse-ckpt-run-id "$(basename "$checkpoints")"
        --save "$checkpoints"
        --load "$checkpoints"
        --save-interval 5000
        --exit-signal-handler
        --ckpt-format torch_dist
    )

    logging=(
        --log-interval 10
        --eval-interval 1000
        --eval-iters 10
        --tensorboard-dir "$checkpoints/tensorboard"
    )

    flags=(
        "${parallel[@]}" "${model[@]}" "${training[@]}" "${data[@]}"
        "${protection[@]}" "${logging[@]}"
    )
}
