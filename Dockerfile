# SPDX-License-Identifier: Apache-2.0
#
#   docker build -t moevement .
#   docker run --init --gpus all --ipc=host --ulimit memlock=-1 --user "$(id -u):$(id -g)" \
#       -v "$PWD/data:/data" moevement \
#       torchrun --nproc-per-node 8 pretrain_gpt.py --sparse-ckpt ...
#
# --ipc=host (or a large --shm-size): the windows live in /dev/shm, at least one copy of the
# training state of every rank on the node. --ulimit memlock=-1: they are pinned for copies.
# --init: reaps the child processes of dead workers.
# The base image has PyTorch, Transformer Engine and Apex built for each other. It needs
# PyTorch >= 2.11 and Python >= 3.12; the pip command below refuses older versions.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${BASE_IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/moevement

# PIP_CONSTRAINT of NVIDIA's images has constraints that this project's packages need not satisfy.
# These constraints keep pip from replacing packages compiled for the base: pip fails instead.
RUN --mount=type=bind,target=/src,rw \
    pip list --format=freeze \
        | grep -iE '^(torch|triton|pytorch-triton|transformer[-_]engine|apex|flash[-_]attn|numpy)' \
        > /tmp/base-constraints.txt \
    && PIP_CONSTRAINT='' pip install --no-cache-dir --constraint /tmp/base-constraints.txt \
        '/src[tools,metrics]' nvidia-ml-py \
    && rm /tmp/base-constraints.txt

# torchrun needs this file; the command `moevement` runs all other programs.
COPY pretrain_gpt.py ./

# Any user id may run the image: caches are in a world-writable directory, and nothing needs root.
ENV HOME=/tmp \
    TRITON_CACHE_DIR=/tmp/triton \
    TORCHINDUCTOR_CACHE_DIR=/tmp/inductor \
    PYTHONUNBUFFERED=1
USER 1000:1000

CMD ["moevement", "--help"]
