#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the checks that need one GPU: kernels with one and with eight connections of the device, then
# whole jobs. Results and hardware go to runs/gpu-check/gpu-check.json, which can be kept in
# docs/measurements. Options are pytest's, and those of tests/gpu/jobs/conftest.py.
#
#   scripts/gpu_check.sh                   # .venv, everything
#   scripts/gpu_check.sh --wheels wheels   # with an installed torch, without downloads
#   scripts/gpu_check.sh --jobs -k nccl    # of the jobs, those with this name
#   scripts/gpu_check.sh --cpu             # a dry run of the jobs, without a GPU

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ENVIRONMENT=.venv-gpu
wheels=
kernels=yes
gpu=yes
python=.venv/bin/python
options=()

while (($#)); do
    case $1 in
        --wheels)
            wheels=${2:-}
            shift
            ;;
        --wheels=*) wheels=${1#*=} ;;
        --jobs) kernels= ;;
        --cpu)
            kernels=
            gpu=
            options+=("$1")
            ;;
        *) options+=("$1") ;;
    esac
    shift
done

# An environment with all packages of python3, even those of a virtual environment, plus the wheels;
# also works where package versions are pinned (as in NVIDIA's images).
install_wheels() {
    if ! compgen -G "$wheels/*.whl" >/dev/null; then
        echo "gpu_check: --wheels $wheels: there is no wheel in it" >&2
        exit 2
    fi
    rm -rf "$ENVIRONMENT"
    python3 -m venv --system-site-packages --without-pip "$ENVIRONMENT"
    python=$ENVIRONMENT/bin/python
    python3 - "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'EOF'
import pathlib, site, sys
lines = [f'import site; site.addsitedir({folder!r})\n' for folder in site.getsitepackages()]
pathlib.Path(sys.argv[1], 'around.pth').write_text(''.join(lines))
EOF
    PIP_CONSTRAINT='' python3 -m pip --python "$python" install --quiet --no-index --no-deps \
        --no-compile --disable-pip-version-check --ignore-installed "$wheels"/*.whl
}

# Checks requirements of setup.py and of the check by importing them; hides upstream's warnings.
check_packages() {
    TORCHDYNAMO_DISABLE=1 "$python" - 2>/dev/null <<'EOF' || exit 2
import importlib, sys
for name in ('torch', 'numpy', 'msgspec', 'xxhash', 'psutil', 'rich', 'tqdm', 'pytest',
             'pytest_timeout', 'hypothesis', 'megatron.core', 'megatron.training', 'megatron.moevement',
             'moevement_ext'):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        needed = '' if error.name == name else f', which {name} needs'
        print(f'gpu_check: {error.name} is missing{needed}: put a wheel of it into the folder of '
              '--wheels, or leave --wheels out where packages can be downloaded')
        sys.exit(1)
    except Exception as error:
        print(f'gpu_check: {name} cannot be imported: {type(error).__name__}: {error}')
        sys.exit(1)
EOF
}

if [[ -n $wheels ]]; then
    install_wheels
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
    check_packages
else
    scripts/setup_env.sh
fi

# A hanging test ends the run, and its stack is printed: it may block in CUDA, where no signal
# reaches it.
run_tests() {
    "$python" -m pytest -q -p no:cacheprovider --timeout-method=thread "$@" || status=1
}

if [[ -n $gpu ]] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo 'gpu_check: there is no CUDA device here; run it on a machine with a GPU, or with --cpu' >&2
    exit 2
fi
status=0
if [[ -n $kernels ]]; then
    for connections in 1 8; do # as with tensor parallelism, and torch's default
        CUDA_DEVICE_MAX_CONNECTIONS=$connections run_tests --timeout=100 \
            tests/gpu --ignore=tests/gpu/jobs tests/transformer_engine/test_rules.py
    done
fi
run_tests tests/gpu/jobs --output runs/gpu-check "${options[@]}"
exit $status
