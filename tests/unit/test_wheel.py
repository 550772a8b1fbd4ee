# SPDX-License-Identifier: Apache-2.0
"""What `pip install .` brings into an environment that has torch, and that it works from there.

The environment is new. Packages of others are those of this one, seen through links, so that
nothing is downloaded: pip is told that there is no index.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from moevement_ext import __version__
from moevement_ext.command import PROGRAMS
from tests.distributed.harness.ports import free_port, listens
from tests.rules.test_repository import ROOT

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1200)]
NAME = f'megatron_moevement-{__version__}'
OURS = 'megatron_moevement', '__editable__'


def tracked(*folders: str) -> list[str]:
    listed = subprocess.check_output(['git', 'ls-files', '--', *folders], cwd=ROOT, text=True)
    return [name for name in listed.split() if (ROOT / name).exists()]


def built(what: str, source: Path, target: Path) -> Path:
    """Path of a wheel or an sdist, built of `source` by setuptools."""
    target.mkdir()
    code = f'import setuptools.build_meta as b, sys; print(b.build_{what}(sys.argv[1]))'
    command = [sys.executable, '-c', code, str(target)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


@pytest.fixture(scope='module')
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files alone, as building writes beside them."""
    folder = tmp_path_factory.mktemp('source')
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope='module')
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of the sdist, as pip does where there is no wheel."""
    folder = tmp_path_factory.mktemp('built')
    packed = built('sdist', source, folder / 'sdist')
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter='data')
    return built('wheel', folder / NAME, folder / 'wheel')


def test_the_wheel_has_every_file_of_the_programs_and_no_other(wheel: Path) -> None:
    programs = tracked('tools')
    expected = [name.replace('tools', 'moevement_ext/programs', 1) for name in programs]
    expected += tracked('moevement_ext', 'megatron')
    data = tracked('deploy/*/*', 'examples', 'scripts/slurm_*', 'scripts/*.py')
    expected += [f'moevement_ext/{name}' for name in data]
    found = [name for name in zipfile.ZipFile(wheel).namelist() if '.dist-info/' not in name]
    assert sorted(found) == sorted(expected)


def test_metadata_describe_the_package(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(f'{NAME}.dist-info/METADATA').decode()
    assert (
        '\n# MoEvement on Megatron-Core\n' in metadata and '\nRequires-Python: >=3.12' in metadata
    )
    assert '\nRequires-Dist: torch>=2.11\n' in metadata
    assert '\nProject-URL: ' in metadata and '\nClassifier: ' in metadata
    links = re.findall(r'\]\(([^)\s]+)\)', metadata)
    assert len(links) > 50 and all(re.match('https?://|#', link) for link in links)
    assert 'https://git.example.org/megatron-moevement/raw/main/docs/assets/' in metadata
    assert "'megatron-moevement[tools] @ git+https://git.example.org/" in metadata
    top = archive.read(f'{NAME}.dist-info/top_level.txt').decode().split()
    assert top == ['megatron', 'moevement_ext']


@pytest.fixture(scope='module')
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the programs of a new environment that has the wheel."""
    folder = tmp_path_factory.mktemp('environment')
    others = folder / 'others'
    others.mkdir()
    (site,) = {Path(path) for path in sys.path if (Path(path) / 'torch').is_dir()}
    for entry in site.iterdir():
        if not entry.name.startswith(OURS):
            (others / entry.name).symlink_to(entry)
    venv.create(folder / 'venv', with_pip=True)
    (packages,) = (folder / 'venv' / 'lib').glob('python*/site-packages')
    (packages / 'others.pth').write_text(f'{others}\n')
    pip = [folder / 'venv' / 'bin' / 'python', '-m', 'pip', 'install', '--no-index']
    done = run(folder, *pip, f'{wheel}[tools]')
    assert f'Successfully installed {NAME.replace("_", "-")}\n' in done, done  # and no torch
    assert not (packages / 'tools').exists() and not (packages / 'torch').exists()
    return folder / 'venv' / 'bin'


def run(folder: Path, *command: str | Path, status: int = 0) -> str:
    """Output of a command in a folder that is no checkout, without a path to one."""
    foreign = ('PYTHONPATH', 'VIRTUAL_ENV', 'PYTHONSAFEPATH')
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    environment |= {'PYTHONWARNINGS': 'ignore', 'CUDA_VISIBLE_DEVICES': ''}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == status, f'{command}: {done.stdout[-3000:]} {done.stderr[-3000:]}'
    return done.stdout + done.stderr


def test_the_command_has_its_programs(installed: Path, tmp_path: Path) -> None:
    moevement = installed / 'moevement'
    assert run(tmp_path, moevement, '--version') == f'moevement {__version__}\n'
    for name in ('pretrain', 'launch', 'plan', 'simulate', 'bench'):
        assert run(tmp_path, moevement, name, '--help').startswith(f'usage: moevement {name} ')
    assert {'pretrain', 'launch', 'plan', 'simulate', 'bench'} < PROGRAMS.keys()
    planned = run(tmp_path, moevement, 'plan', '--model', 'deepseek-moe', '--cluster', 'h100',
                  '--mfu', '0.3')  # fmt: skip
    assert 'window' in planned
    assert 'figures and text' in run(tmp_path, moevement, 'simulate', 'paper')
    assert list(tmp_path.iterdir()) == []


def test_files_of_operators_are_written(installed: Path, tmp_path: Path) -> None:
    moevement = installed / 'moevement'
    written = {
        'grafana': ['moevement.json'],
        'alerts': ['alerts.yml', 'alerts_test.yml'],
        'jobset': ['README.md', 'jobset.yaml', 'podmonitor.yaml'],
    }
    for what, names in written.items():
        assert len(run(tmp_path, moevement, 'deploy', what).splitlines()) == len(names)
        assert sorted(path.name for path in (tmp_path / what).iterdir()) == names
    said = run(tmp_path, moevement, 'deploy', 'alerts', status=2)
    assert said.startswith('moevement deploy: error: alerts/alerts.yml: File exists; give another')
    run(tmp_path, moevement, 'slurm', '--write-script', 'train.sbatch')
    script = tmp_path / 'train.sbatch'
    assert 'source ' not in script.read_text('utf-8')
    (tmp_path / 'scontrol').write_text("#!/bin/sh\nprintf 'a\\nb\\n'\n")
    (tmp_path / 'scontrol').chmod(0o755)
    slurm = {
        'SLURM_SUBMIT_DIR': str(tmp_path), 'SLURM_JOB_NODELIST': 'a,b', 'SLURM_JOB_ID': '1',
        'SLURM_JOB_NAME': 'x', 'SPARE_NODES': '2', 'PATH': f'{tmp_path}:/usr/bin:/bin',
    }  # fmt: skip
    variables = [f'{name}={value}' for name, value in slurm.items()]
    said = run(tmp_path, 'env', *variables, 'bash', script, status=2)
    assert '--spare-nodes 2 must be at least 0 and leave a node' in said  # the launcher's words


def test_examples_run_where_they_are_written(installed: Path, tmp_path: Path) -> None:
    run(tmp_path, installed / 'moevement', 'deploy', 'examples')
    for name in ('own_loop', 'pipeline_loop', 'data_parallel_loop'):
        said = run(tmp_path, installed / 'python', f'examples/{name}.py', '--help')
        assert said.startswith(f'usage: {name} ')


def test_foreign_tools_packages_do_not_collide(installed: Path, tmp_path: Path) -> None:
    (tmp_path / 'tools').mkdir()
    (tmp_path / 'tools' / '__init__.py').write_text('raise SystemExit("of another")')
    run(tmp_path, installed / 'moevement', 'check', '--help')
    said = run(tmp_path, installed / 'python', '-c', 'import moevement_ext, tools', status=1)
    assert said == 'of another\n'


_WAITS = """
import os, pathlib, time
here = pathlib.Path(os.environ['HERE'], os.environ['RANK'])
here.write_text(f'{os.environ["MOEVEMENT_NODE"]} {os.getpid()} {os.environ["WORLD_SIZE"]}')
while not (here.parent / 'go').exists():
    time.sleep(0.1)
"""


# As its script does: with -m, torch imports this module a second time, and plug-ins find it whole.
_TORCHRUN = 'import torch.distributed.run as torchrun; torchrun.main()'


def test_standby_node_of_plain_torchrun_takes_a_lost_seat(installed: Path, tmp_path: Path) -> None:
    """Neither a node that trains nor one that waits starts its workers in vain."""
    (tmp_path / 'waits.py').write_text(_WAITS)
    port = free_port()
    command = [
        installed / 'python', '-c', _TORCHRUN, '--nnodes', '2:3',
        '--nproc-per-node', '1', '--max-restarts', '9', '--rdzv-backend', 'moevement',
        '--rdzv-endpoint', f'127.0.0.1:{port}', tmp_path / 'waits.py',
    ]  # fmt: skip
    foreign = ('PYTHONPATH', 'VIRTUAL_ENV', 'PYTHONSAFEPATH')
    own = {name: value for name, value in os.environ.items() if name not in foreign}

    def placed() -> dict[str, list[str]]:
        found = {rank: tmp_path / rank for rank in ('0', '1') if (tmp_path / rank).exists()}
        return {rank: path.read_text().split() for rank, path in found.items()}

    def wait_for(condition: Callable[[], bool]) -> None:
        while not condition():
            alive = [agent for agent in agents.values() if agent.poll() is None]
            assert len(alive) >= len(agents) - 1, (tmp_path / 'log').read_text()
            time.sleep(0.1)

    with (tmp_path / 'log').open('wb') as log, ExitStack() as stack:
        agents = {}
        for node in ('a', 'b', 'c'):
            environment = {**own, 'HERE': str(tmp_path), 'MOEVEMENT_NODE': node}
            agents[node] = stack.enter_context(subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=log, stderr=log))  # fmt: skip
            stack.callback(agents[node].kill)
            if node == 'a':  # it serves the store, and so does not stand by
                wait_for(lambda: listens(port))
        wait_for(lambda: len(placed()) == 2)
        before = placed()
        (waits,) = agents.keys() - {node for node, _, _ in before.values()}
        (lost,) = (rank for rank in before if before[rank][0] != 'a')
        agents[before[lost][0]].kill()
        os.kill(int(before[lost][1]), signal.SIGKILL)
        wait_for(lambda: placed()[lost][:1] == [waits])
        (kept,) = before.keys() - {lost}
        assert placed()[kept] == before[kept] and placed()[lost][2] == '2'
        (tmp_path / 'go').touch()
        assert agents['a'].wait(120) == agents[waits].wait(120) == 0, (tmp_path / 'log').read_text()


def test_launched_job_loses_a_worker_and_is_reported(installed: Path, tmp_path: Path) -> None:
    """The demo: data, launcher, trainer, replay, digests and a page, all from the wheel."""
    said = run(tmp_path, installed / 'moevement', 'demo', '--output', 'out')
    assert '\ndemo: bit_identical=true' in said
    assert [path.name for path in tmp_path.iterdir()] == ['out']
