#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the packages that `moevement compare peers` compares with this project into .peers,
# a folder that no other program reads. They use the torch and Megatron of .venv, whatever versions
# they require. A second call is instant.
#
#   scripts/peers.sh && .venv/bin/moevement compare peers

set -euo pipefail
(($# == 0)) || {
    echo "$0: $1: there are no flags; the head of this file says what it does" >&2
    exit 2
}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup_env.sh

readonly TARGET=.peers
readonly PEERS=(nvidia-resiliency-ext==0.7.0 lm-resiliency==0.2.0 torchft==0.2.0)
# Imports of these packages that .venv lacks; none of them installs another torch.
readonly NEEDED=(defusedxml fastapi grpcio httpx nvidia-ml-py pydantic-settings slowapi uvicorn)
readonly STAMP=$TARGET/.installed

[[ -f $STAMP && $(<"$STAMP") == "${PEERS[*]} ${NEEDED[*]}" ]] && exit 0
rm -rf "$TARGET"
install() {
    .venv/bin/python -m pip install --quiet --no-compile --only-binary=:all: --target "$TARGET" "$@"
}
install "${NEEDED[@]}"
for peer in "${PEERS[@]}"; do
    # Wheels for a newer glibc than this system's; their Python code works nevertheless.
    install --no-deps --upgrade --platform manylinux_2_39_x86_64 \
        --platform manylinux2014_x86_64 --platform any "$peer"
done
# lm-resiliency's entry point for torchrun has a wrong signature: every process would warn.
rm -f "$TARGET"/lm_resiliency-*.dist-info/entry_points.txt
echo "${PEERS[*]} ${NEEDED[*]}" >"$STAMP"
