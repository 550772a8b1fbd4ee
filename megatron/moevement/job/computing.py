# SPDX-License-Identifier: Apache-2.0
"""Software versions, hardware and environment variables that may affect bits.

A difference is reported, not refused: most releases compute the same bits, and most variables do
not matter for most models.
"""

import os
import platform
import re
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import megatron.core
import torch
import xxhash

import moevement_ext
from moevement_ext.memory.window.settings import Table, digest_of

_TABLES = tomllib.loads(Path(__file__).with_suffix('.toml').read_text('utf-8'))
_PACKAGES: list[str] = _TABLES['packages'].split()
_VARIABLES = re.compile('|'.join(_TABLES['variables']))

_DRIVER = Path('/proc/driver/nvidia')
_CPU_INFO = Path('/proc/cpuinfo')
# The CPU's maker, and its vector and matrix units: libraries choose their kernels by them.
_CPU_MAKER = re.compile(r'(?:vendor_id|CPU implementer)\s*:\s*(\S+)')
_CPU_UNITS = re.compile(r'\n(?:flags|Features)\s*:(.*)')
_UNIT = re.compile(r'(?:avx|amx|fma|asimd|sve|sme|bf16)\w*')
_READ_BYTES = 2**20
_NCCL_SETTINGS = Path('/etc/nccl.conf'), Path(os.path.expanduser('~/.nccl.conf'))


def code_of(folders: Iterable[Path]) -> str:
    """Digest of the paths and sizes of all Python files below; 10 ms for 900 of them."""
    found = []
    for folder in folders:
        for parent, _, files in os.walk(folder):
            below = os.path.relpath(parent, folder)
            for name in files:
                if name.endswith('.py'):
                    with suppress(OSError):  # it is being replaced
                        size = os.stat(os.path.join(parent, name)).st_size
                        found.append((os.path.join(below, name), size))
    return digest_of(sorted(found))


def release_of(package: str) -> Table:
    """The release that this process imported, or would import; empty if there is none.

    Its folder comes second, unless that is the installed package's: PYTHONPATH may name a checkout.
    """
    installed = next(iter(metadata.distributions(name=package)), None)
    for module in filter(None, (sys.modules.get(package.replace('-', mark)) for mark in '._')):
        folder = Path(*module.__path__[:1])
        if installed is None or not folder.is_relative_to(str(installed.locate_file(''))):
            version = str(getattr(module, '__version__', 'unknown release'))
            return {package: version, f'folder of {package}': str(folder)}
    return {} if installed is None else {package: installed.version}


# Versions of packages, and digests of those that users modify in place, taken right after this
# process (or its parent, if it was forked) imported them.
_VERSIONS = {name: found for one in _PACKAGES for name, found in release_of(one).items()}
_CODE = {
    'megatron-core': code_of(Path(path) for path in megatron.core.__path__),
    'megatron-moevement': code_of([Path(moevement_ext.__file__).parent, Path(__file__).parents[1]]),
}


def versions(on_cpu: bool) -> Table:
    """Versions of Python, installed packages, this package, the program, GPU, driver and CPU.

    The program has no version, so its content is digested. A checkout keeps its version while its
    code changes, so the code of upstream and of this package is digested by file sizes.
    """
    found = {'python': platform.python_version(), 'megatron-moevement': moevement_ext.__version__}
    found |= _VERSIONS
    found |= {f'code of {name}': digest for name, digest in _CODE.items()}
    found['torch'] = str(torch.__version__)  # includes the CUDA version it was built for
    found['CUDA of torch'] = str(torch.version.cuda)
    program = Path(sys.argv[0])
    if program.is_file():
        digest = xxhash.xxh3_64_hexdigest(program.read_bytes())
        found['program'] = f'{program.name} ({digest})'
    found |= _cpu() if on_cpu else _gpus()
    return found


def environment() -> Table:
    """Environment variables that may affect bits, read when training begins.

    Includes variables of NCCL's configuration files. If a variable names a file, the value includes
    a digest of the file.
    """
    found: Table = {}
    for path in _NCCL_SETTINGS:
        with suppress(OSError, ValueError):
            pairs = (line.partition('=') for line in path.read_text().splitlines())
            found |= {name.strip(): value.strip() for name, sign, value in pairs if sign}
    found |= os.environ
    return {
        name: _with_content(value) for name, value in found.items() if _VARIABLES.fullmatch(name)
    }


def _cpu() -> Table:
    """CPU properties that select kernels, and thread counts, which split sums into parts.

    Unless OMP_NUM_THREADS is set, the number of threads is that of the cores that a process may
    use: with equal environments, machines of different sizes compute different bits.
    """
    found = {
        'instructions of the CPU': torch.backends.cpu.get_cpu_capability(),
        'threads of torch on the CPU': str(torch.get_num_threads()),
    }
    with suppress(OSError, ValueError), open(_CPU_INFO, encoding='ascii') as file:
        first = file.read().partition('\n\n')[0]
        units = ' '.join(_CPU_UNITS.findall(first)).split()
        known = sorted({unit for unit in units if _UNIT.fullmatch(unit)})
        found['CPU'] = ' '.join([*_CPU_MAKER.findall(first), *known])
    return found


def _gpus() -> Table:
    """GPU models and driver version from /proc, which needs no context on a GPU."""
    found = Table()
    with suppress(OSError):
        texts = [file.read_text() for file in _DRIVER.glob('gpus/*/information')]
        models = {model for text in texts for model in re.findall(r'Model:\s*(.+)', text)}
        if models:
            found['GPU'] = ', '.join(sorted(models))
        for version in re.findall(r'Module\D+([\d.]+)', (_DRIVER / 'version').read_text())[:1]:
            found['driver of the GPU'] = version
    return found


def _with_content(value: str) -> str:
    with suppress(OSError, ValueError):
        path = Path(value)
        if path.is_file():
            with open(path, 'rb') as file:  # a library may have gigabytes
                begin = file.read(_READ_BYTES)
            return f'{value} ({path.stat().st_size} bytes, {xxhash.xxh3_64_hexdigest(begin)})'
    return value
