# SPDX-License-Identifier: Apache-2.0
"""The image is really built, on a base made here; a job in it loses a node.

Needs root, buildah and mmdebstrap, Debian's and Python's registries, and 25 GB of disk.
"""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.geteuid() != 0 or None in map(shutil.which, ('buildah', 'mmdebstrap')),
        reason='needs root, and Debian packages buildah and mmdebstrap',
    ),
]
ROOT = Path(__file__).resolve().parents[2]
OF_HOST = [path for path in ('/etc/ssl/certs', '/etc/pip.conf') if Path(path).exists()]
"""Host settings that make the registries reachable."""
ORDINARY_USER = '1000:1000'


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f'{done.stdout[-3000:]}\n{done.stderr[-3000:]}'
    return done.stdout


def build(image: str, file: Path, context: Path, *flags: str) -> None:
    volumes = [f'--volume={path}:{path}:ro' for path in OF_HOST]
    isolated = ('--isolation=chroot', '--network=host', '--format=docker', *volumes)
    run('buildah', 'build', *isolated, *flags, '--tag', image, '--file', file, context)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[str]:
    """A container of the image of this checkout."""
    name = f'moevement-test-{uuid.uuid4().hex[:8]}'
    base, image = f'{name}-base', f'{name}-image'
    packages = '--include=python3,python3-venv,ca-certificates'
    try:
        run('mmdebstrap', '--variant=minbase', packages, 'trixie', tmp_path / 'rootfs.tar')
        build(base, Path(__file__).with_name('base.Dockerfile'), tmp_path)
        build(image, ROOT / 'Dockerfile', ROOT, f'--build-arg=BASE_IMAGE=localhost/{base}')
        run('buildah', 'from', '--name', name, f'localhost/{image}')
        yield name
    finally:
        subprocess.run(['buildah', 'rm', name], check=False)
        subprocess.run(['buildah', 'rmi', image, base], check=False)


def test_demo_recovers_in_the_image_as_an_ordinary_user(container: str) -> None:
    ran = run(
        *('buildah', 'run', '--isolation=chroot', '--user', ORDINARY_USER),
        *('--volume=/dev/shm:/dev/shm', container, '--'),
        *('moevement', 'demo', '--output', '/tmp/demo'),
    )
    assert 'demo: bit_identical=true' in ran.splitlines()[-1]
