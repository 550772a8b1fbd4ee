#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds Transformer Engine against the torch of .venv, on a machine without a GPU: it imports there
# and shows its rules (tests/transformer_engine), but its kernels need a GPU. Its torch extension
# comes as source alone, 33 files of plain C++; without optimisation, as here, they take about 45
# minutes of one core. Needs a CUDA toolkit and g++; wheels and source come from PyPI.
# A call that was interrupted goes on where it was; one after a complete build is instant.
#
#   scripts/build_transformer_engine.sh ~/transformer-engine
#   . ~/transformer-engine/environment && .venv/bin/python -m pytest -q tests/transformer_engine
#
# MAX_JOBS: files that are compiled at a time, if there is ninja (default: one for each core).
# CUDA_HOME: the CUDA toolkit (default: /usr/local/cuda).

set -euo pipefail

if (($# != 1)) || [[ $1 == -* ]]; then
    sed -n '4,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi

readonly VERSION=2.20.2
mkdir -p "$1"
DIR=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly DIR SITE=$DIR/site SOURCE=$DIR/transformer_engine_torch-$VERSION
readonly PYTHON=$PWD/.venv/bin/python
readonly LIBRARIES=$SITE/transformer_engine/wheel_lib
# What transformer_engine.pytorch imports and .venv does not have.
readonly REQUIRED=(
    pydantic pydantic_core annotated-types typing-inspection nvidia-cudnn-frontend
    importlib_metadata zipp nvdlfw-inspect onnxscript onnx onnx_ir ml_dtypes
)

log() { printf '[transformer-engine] %s\n' "$*" >&2; }

# Folders of the nvidia packages beside torch, joined by colons.
of_nvidia() {
    "$PYTHON" - "$1" <<'PY'
import pathlib, sys, sysconfig
folders = pathlib.Path(sysconfig.get_path('purelib'), 'nvidia').glob(f'*/{sys.argv[1]}')
print(':'.join(map(str, sorted(folders))))
PY
}

write_environment() {
    cat >"$DIR/environment" <<SH
# To be sourced: Python then imports Transformer Engine $VERSION.
export LD_LIBRARY_PATH=$(of_nvidia lib)\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export PYTHONPATH=$SITE\${PYTHONPATH:+:\$PYTHONPATH}
export TORCHDYNAMO_DISABLE=1
SH
}

imports() {
    # shellcheck source=/dev/null
    (. "$DIR/environment" && "$PYTHON" -c 'import transformer_engine.pytorch.optimizers')
}

fetch_source() {
    [[ -e $SOURCE/.whole ]] && return
    log "source of the torch extension: $SOURCE"
    rm -rf "$SOURCE"
    "$PYTHON" -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
        --dest "$DIR" "transformer_engine_torch==$VERSION"
    tar -xzf "$SOURCE.tar.gz" -C "$DIR"
    sed -i 's/"-O3"/"-O0"/' "$SOURCE/build_tools/pytorch.py"
    touch "$SOURCE/.whole"
}

install_wheels() {
    [[ -e $SITE/.whole ]] && return
    local cuda
    cuda=$("$PYTHON" -c 'import torch; print(torch.version.cuda.split(".")[0])')
    log "wheels for CUDA $cuda: $SITE"
    rm -rf "$SITE"
    "$PYTHON" -m pip install --quiet --no-deps --target "$SITE" \
        "transformer_engine==$VERSION" "transformer_engine_cu$cuda==$VERSION" "${REQUIRED[@]}"
    touch "$SITE/.whole"
}

compile() {
    log "compiling in $SOURCE"
    (
        cd "$SOURCE"
        export PATH=${PYTHON%/*}:$PATH CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
        export NVTE_PYTORCH_FORCE_BUILD=TRUE PYTHONPATH=$SITE
        CPATH=$(of_nvidia include) "$PYTHON" setup.py build_ext
    )
    cp "$SOURCE"/build/lib.*/transformer_engine/wheel_lib/transformer_engine_torch*.so "$LIBRARIES/"
}

scripts/setup_env.sh
write_environment
if [[ -e $SITE/.whole ]] && imports 2>/dev/null; then
    log 'is built'
    exit
fi
fetch_source
install_wheels
compile
imports || {
    log "it is compiled, but cannot be imported; .venv has another torch now? Remove $DIR and call again"
    exit 1
}
log "is built; next: . $DIR/environment"
