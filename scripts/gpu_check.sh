#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the checks that need one GPU; --help lists the stages. Results and hardware go to
# runs/gpu-check/gpu-check.json, which can be kept in docs/measurements.
#
#   scripts/gpu_check.sh                   # .venv, everything that has not passed yet
#   scripts/gpu_check.sh --wheels wheels   # with an installed torch, without downloads
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
