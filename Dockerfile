# SPDX-License-Identifier: Apache-2.0
#
#   docker build -t moevement .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 --user "$(id -u):$(id -g)" \
#       -v "$PWD/data:/data" moevement \
#       torchrun --nproc-per-node 8 pretrain_gpt.py --sparse-ckpt ...
#
# --ipc=host (or a large --shm-size): the windows live in /dev/shm, at least one copy of the
# training state of every rank on the node. --ulimit memlock=-1: they are pinned for copies.
#
# The base brings PyTorch, Transformer Engine and Apex built for each other. It must hold
# PyTorch >= 2.11 and Python >= 3.12; pip refuses an older one below.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${BASE_IMAGE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/moevement

# NVIDIA's images name constraints of their own in PIP_CONSTRAINT, which our packages need not fit.
# Ours keep pip from replacing what the base compiled: it fails instead.
RUN --mount=type=bind,target=/src,rw \
    pip list --format=freeze \
        | grep -iE '^(torch|triton|pytorch-triton|transformer[-_]engine|apex|flash[-_]attn|numpy)' \
        > /tmp/base-constraints.txt \
    && PIP_CONSTRAINT='' pip install --no-cache-dir --constraint /tmp/base-constraints.txt \
        '/src[tools,metrics]' nvidia-ml-py \
    && rm /tmp/base-constraints.txt

# For torchrun; all other programs are those of the command.
COPY pretrain_gpt.py ./

# Any user id may run it: caches go where everybody can write, nothing here needs root.
ENV HOME=/tmp \
    TRITON_CACHE_DIR=/tmp/triton \
    TORCHINDUCTOR_CACHE_DIR=/tmp/inductor \
    PYTHONUNBUFFERED=1
USER 1000:1000

CMD ["moevement", "--help"]
