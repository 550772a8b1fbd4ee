#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks on one GPU what cannot be seen without; --help has the stages. Results and hardware go to
# runs/gpu-check/gpu-check.json, which can be kept in docs/measurements.
#
#   scripts/gpu_check.sh                   # .venv, everything that has not passed yet
#   scripts/gpu_check.sh --wheels wheels   # around an installed torch, where nothing is downloaded
#   scripts/gpu_check.sh --stage nccl      # one stage, again

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ENVIRONMENT=.venv-gpu
wheels=
python=.venv/bin/python

arguments=("$@")
for ((i = 0; i < ${#arguments[@]}; i++)); do
    case ${arguments[i]} in
        --wheels) wheels=${arguments[i + 1]:-} ;;
        --wheels=*) wheels=${arguments[i]#*=} ;;
    esac
done

# An environment that sees all that python3 sees, be that one of a virtual environment itself, and
# has the wheels besides, also where the versions of packages are held (NVIDIA's images do so).
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

# What setup.py requires and the check needs, by importing it; upstream's warnings are not shown.
check_packages() {
    TORCHDYNAMO_DISABLE=1 "$python" - 2>/dev/null <<'EOF' || exit 2
import importlib, sys
for name in ('torch', 'numpy', 'msgspec', 'xxhash', 'psutil', 'rich', 'tqdm', 'pytest',
             'pytest_timeout', 'megatron.core', 'megatron.training', 'megatron.moevement',
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
exec "$python" -m tools.gpu_check "$@"
