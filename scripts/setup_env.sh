#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Creates .venv in this checkout with everything the trainer, the tools and the tests need.
# A second call is instant, unless setup.py or the Python version has changed.
# Safe to call from several processes at once; continues after an interrupted call.
#
#   scripts/setup_env.sh && .venv/bin/python pretrain_gpt.py --help
#   scripts/setup_env.sh --cpu    # to try it: PyTorch without CUDA, 0.2 GB instead of 5
#
# With --cpu, PyTorch comes from the pip index TORCH_CPU_INDEX.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly LOCK=.venv.lock
readonly STAMP=$VENV/.installed  # fingerprint of the last complete installation
readonly BUILDING=$VENV/.building  # exists during an installation, and after an interrupted one
readonly EXTRAS=test,tools,metrics,docs
readonly CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
cpu=

log() { printf '[setup_env] %s\n' "$*" >&2; }

step() {
    local what=$1 start=$SECONDS
    shift
    log "$what ..."
    "$@" >&2
    log "$what: done in $((SECONDS - start)) s"
}

# Tests Python by running it: a pyenv shim can be on PATH without a Python behind it, and a
# distribution's Python can lack venv.
is_usable() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3.12 python3.13 python3.14 python3; do
        if is_usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    # 3.12 before later versions (development uses it), its newest patch release first.
    while read -r candidate; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done < <(
        for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
            version=$(basename "$(dirname "$(dirname "$candidate")")")
            printf '%s\t%s\n' "$version" "$candidate"
        done | sort -t. -k2,2n -k3,3nr | cut -f2
    )
    log 'no usable Python >= 3.12 found (megatron-core 0.19 needs it).'
    log 'Looked for python3.12, python3.13, python3.14, python3 on PATH and for pyenv versions.'
    log 'Install one (e.g. "apt install python3.12-venv" or "pyenv install 3.12") and try again.'
    return 1
}

fingerprint() {
    { "$VENV/bin/python" -VV && echo "$EXTRAS" && cat setup.py; } | sha256sum | cut -d' ' -f1
}

is_complete() {
    [[ -f $STAMP && ! -e $BUILDING && -x $VENV/bin/python && $(<"$STAMP") == "$(fingerprint)" ]]
}

create_environment() {
    local python
    python=$(find_python)
    mkdir "$VENV"
    touch "$BUILDING"
    step "creating $VENV with $("$python" -V) ($python)" "$python" -m venv "$VENV"
}

install_packages() {
    # compat: a plain path entry instead of an import hook, so that tools that read paths (mypy,
    # pkgutil) see this megatron/ next to the installed one.
    # In a log, progress bars and 300 lines of package names would hide later output.
    local quiet=()
    [[ -t 2 ]] || quiet=(--quiet --progress-bar off)
    local pip=("$VENV/bin/python" -m pip install --disable-pip-version-check "${quiet[@]}")
    if [[ $cpu ]] && ! "${pip[@]}" --index-url "$CPU_INDEX" 'torch>=2.11'; then
        log "--cpu: no PyTorch from $CPU_INDEX: name another in TORCH_CPU_INDEX, or leave it out"
        return 1
    fi
    "${pip[@]}" \
        --config-settings editable_mode=compat --editable ".[$EXTRAS]"
}

# An interrupted run leaves a partial environment; installed packages stay. pip records INSTALLER
# once all files of a package exist; files of partly installed packages are written again.
take_up() {
    local info
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        step "removing $VENV, left half-built without pip by an interrupted run" rm -rf "$VENV"
        return
    fi
    log "continuing with $VENV, left half-built by an interrupted run"
    for info in "$VENV"/lib/python*/site-packages/*.dist-info; do
        if [[ ! -e $info/INSTALLER ]]; then
            rm -rf "$info"
        fi
    done
    rm -rf "$VENV"/lib/python*/site-packages/~*  # what pip had moved out of the way
}

build() {
    if [[ -e $BUILDING ]]; then
        take_up
    fi
    if [[ -e $VENV ]] && ! is_usable "$VENV/bin/python"; then
        step "removing $VENV, whose Python does not run or is older than 3.12" rm -rf "$VENV"
    fi
    if [[ ! -e $VENV ]]; then
        create_environment
    fi
    touch "$BUILDING"
    rm -f "$STAMP"
    local size='torch and CUDA libraries: about 5 GB, some minutes'
    [[ -z $cpu ]] || size='torch for the CPU'
    step "installing packages ($size)" install_packages
    step 'checking that the megatron namespace is whole' \
        env TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 "$VENV/bin/python" -W ignore -c \
        'import megatron.core, megatron.moevement, megatron.training, moevement_ext'
    fingerprint >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    rm -f "$BUILDING"
}

main() {
    case $* in
        '') ;;
        --cpu) cpu=yes ;;
        *)
            log "$*: the only flag is --cpu"
            return 2
            ;;
    esac
    if is_complete; then
        return
    fi
    exec 9>"$LOCK"
    local locked=0
    flock --nonblock --conflict-exit-code 75 9 || locked=$?
    if ((locked == 75)); then
        log 'another setup is running in this checkout; waiting for it ...'
        flock 9
    elif ((locked)); then
        log 'this file system has no locks: let no other setup run in this checkout meanwhile'
    fi
    if ! is_complete; then  # the other setup may have done the work
        build
        log "ready: $VENV/bin/python ($("$VENV/bin/python" -V)), $SECONDS s in all"
    fi
}

main "$@"
