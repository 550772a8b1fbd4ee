# SPDX-License-Identifier: Apache-2.0
#
# A base without a GPU for the Dockerfile: Debian's Python, and PyTorch. Made of `rootfs.tar`.
FROM scratch
ADD rootfs.tar /
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin
# hadolint ignore=DL3013
RUN pip install --no-cache-dir torch
