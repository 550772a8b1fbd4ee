#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds Transformer Engine against the torch of .venv, on a machine without a GPU: there it can be
# imported for tests of its rules (tests/transformer_engine), but its kernels need a GPU. PyPI has
# only the source of its torch extension, 33 files of plain C++. Compiled without optimisation, as
# here, they take about 45 minutes on one core. Needs a CUDA toolkit and g++; wheels and source come
# from PyPI. After an interruption, repeat the call to continue; after a complete build a call is
# instant.
#
#   scripts/build_transformer_engine.sh ~/transformer-engine
#   . ~/transformer-engine/environment && .venv/bin/python -m pytest -q tests/transformer_engine
#
# For a machine that has a GPU, another torch and no network, in one file below 64 MiB:
#
#   scripts/build_transformer_engine.sh --torch 2.11.0 --arch 90 --pack te.tar.xz ~/te-for-2.11
#   tar -xf te.tar.xz && PYTHONPATH=$PWD/site scripts/gpu_check.sh    # there
#
# --torch VERSION: build against this version, in a separate environment (default: that of .venv).
# --arch ARCH: keep only device code of this architecture, such as 90 for an H100; with --pack.
# --pack FILE: write the packages to FILE, without headers and tests (scripts/pack_libraries.py).
# MAX_JOBS: number of files compiled in parallel, with ninja (default: one per core).
# CUDA_HOME: the CUDA toolkit (default: /usr/local/cuda).

set -euo pipefail

usage() {
    (($# == 0)) || printf '%s\n' "$*" >&2
    sed -n '4,24s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
}

TORCH='' ARCH='' PACK=''
while (($# > 1)); do
    case $1 in
        --torch) TORCH=$2 ;;
        --arch) ARCH=$2 ;;
        --pack) PACK=$2 ;;
        *) usage "unknown: $1" ;;
    esac
    shift 2
done
(($# == 1)) && [[ $1 != -* ]] || usage
[[ -z $TORCH || $TORCH =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || usage "--torch $TORCH must be like 2.11.0"
[[ -z $ARCH || $ARCH =~ ^[0-9]{2,3}$ ]] || usage "--arch $ARCH must be like 90"
[[ -n $ARCH && -n $PACK || -z $ARCH$PACK ]] || usage '--arch and --pack go together'
[[ -z $PACK || -d $(dirname "$PACK") ]] || usage "--pack $PACK: there is no such folder"

readonly VERSION=2.20.2
PACK=${PACK:+$(realpath "$PACK")}
mkdir -p "$1"
DIR=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly DIR TORCH ARCH PACK SITE=$DIR/site SOURCE=$DIR/transformer_engine_torch-$VERSION
readonly OWN=$PWD/.venv/bin/python
PYTHON=$OWN
[[ -z $TORCH ]] || PYTHON=$DIR/venv/bin/python
readonly PYTHON
readonly LIBRARIES=$SITE/transformer_engine/wheel_lib
# Imports of transformer_engine.pytorch that .venv lacks.
readonly REQUIRED=(
    pydantic pydantic_core annotated-types typing-inspection nvidia-cudnn-frontend
    importlib_metadata zipp nvdlfw-inspect onnxscript onnx onnx_ir ml_dtypes
)

log() { printf '[transformer-engine] %s\n' "$*" >&2; }

# Folders of the nvidia packages that torch uses, joined by colons.
of_nvidia() {
    "$PYTHON" - "$1" <<'PY'
import pathlib, sys, sysconfig
folders = pathlib.Path(sysconfig.get_path('purelib'), 'nvidia').glob(f'*/{sys.argv[1]}')
print(':'.join(map(str, sorted(folders))))
PY
}

# With --torch: an environment with this torch and the build requirements of its extensions.
make_environment() {
    [[ -z $TORCH || -e $DIR/venv/.whole ]] && return
    log "torch $TORCH: $DIR/venv"
    rm -rf "$DIR/venv" "$SITE"
    "$OWN" -m venv "$DIR/venv"
    "$PYTHON" -m pip install --quiet "torch==$TORCH" setuptools wheel packaging ninja numpy
    touch "$DIR/venv/.whole"
}

pack() {
    [[ -z $PACK ]] && return
    log "packing $SITE for sm_$ARCH: some minutes"
    "$OWN" scripts/pack_libraries.py "$SITE" "$PACK" --arch "$ARCH"
}

write_environment() {
    cat >"$DIR/environment" <<SH
# Source this file: Python then imports Transformer Engine $VERSION.
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
make_environment
write_environment
if [[ -e $SITE/.whole ]] && imports 2>/dev/null; then
    log 'already built'
    pack
    exit
fi
fetch_source
install_wheels
compile
imports || {
    log "compiled, but cannot be imported. If torch has changed since, remove $DIR and call again"
    exit 1
}
log "built; next: . $DIR/environment"
pack
