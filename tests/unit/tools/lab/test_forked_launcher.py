# SPDX-License-Identifier: Apache-2.0
"""Jobs whose launchers and workers are forks of one process; the program trains nothing."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.readable import dies
from tools.lab import forked_launcher
from tools.lab.errors import LabError
from tools.lab.job import Job
from tools.lab.launch import Launch

pytestmark = [pytest.mark.timed, pytest.mark.timeout(300)]
PROGRAM = """
import os, sys, time

MOEVEMENT_SPARES = True
print('imported by', os.getpid())
importer = os.getpid()


def main():
    name, wait = sys.argv[1:]
    print(f'{name} {importer} {os.environ["MOEVEMENT_OWN"]} {os.environ["RANK"]}')
    while wait == 'wait':
        time.sleep(0.01)
    sys.exit(name == 'failing')


if __name__ == '__main__':
    main()
"""


@pytest.fixture(scope='module')
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Cases of one process share its import."""
    program = tmp_path_factory.mktemp('program') / 'program.py'
    program.write_text(PROGRAM)
    yield program
    forked_launcher.close()


@pytest.fixture
def launch(tmp_path: Path, program: Path) -> Launch:
    return Launch(tmp_path, [], 2, 1, fork=True, program_file=str(program))


def job(launch: Launch, name: str, wait: str = '') -> Job:
    os.environ.pop('PYTEST_CURRENT_TEST', None)  # else each case has an environment of its own
    return Job(launch._replace(
        folder=launch.folder / name, flags=[name, wait], variables={'MOEVEMENT_OWN': f'of {name}'}
    ))  # fmt: skip


def printed(job: Job) -> list[str]:
    return job.text().split()


def test_jobs_share_one_import(launch: Launch) -> None:
    importers = set()
    for name in ('first', 'second'):
        with job(launch, name) as running:
            running.wait()
            assert running.running() is False
        said, importer, *own = printed(running)
        assert [said, *own] == [name, 'of', name, '1']
        importers.add(importer)
    assert len(importers) == 1


def test_workers_end_with_their_launcher(launch: Launch) -> None:
    with job(launch, 'killed', 'wait') as running:
        while 'killed' not in printed(running):
            time.sleep(0.01)
        workers = [psutil.Process(pid) for pid in running.pids()]
        [launcher] = {worker.ppid() for worker in workers}
        ended = psutil.Process(launcher).children(recursive=True)
        assert {worker.pid for worker in workers} < {process.pid for process in ended}
        running.kill()
        running.wait()
        assert not psutil.wait_procs(ended, timeout=120.0)[1]


def test_jobs_outlive_the_process_that_imports(launch: Launch) -> None:
    with job(launch, 'kept', 'wait') as running:
        while 'kept' not in printed(running):
            time.sleep(0.01)
        importer = psutil.Process(int(printed(running)[1]))
        importer.kill()
        assert dies(importer.pid)
        assert running.running()
    with pytest.raises(LabError, match='the template of all workers is gone'), job(launch, 'next'):
        pass
    forked_launcher.close()  # a case that comes later starts another one
