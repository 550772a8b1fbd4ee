# SPDX-License-Identifier: Apache-2.0
"""Real text, flags of small models, and fault-free reference runs shared by the tests."""

import json
import os
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest

# The fork server inherits this environment; it must be set before it starts.
os.environ.update(OMP_NUM_THREADS='1', TORCHDYNAMO_DISABLE='1')
ROOT = Path(__file__).resolve().parents[2]
os.environ['PYTHONPATH'] = f'{ROOT}{os.pathsep}{os.environ.get("PYTHONPATH", "")}'

from moevement_ext.config import SparseCheckpointConfig, flagged  # noqa: E402
from tests.distributed.harness.cluster import NCCL_LIKE, Cluster  # noqa: E402
from tests.distributed.harness.output import upstream_lines  # noqa: E402
from tests.distributed.harness.references import References  # noqa: E402
from tools.lab import models  # noqa: E402

type Make = Callable[..., Cluster]
type Reference = Callable[..., dict]
LINES = 'lines'
"""Where a reference has upstream's log lines (`upstream_lines`)."""
JOBS = pytest.StashKey[list[Cluster]]()
"""The jobs that a test has made."""
MODEL = [
    *models.ToyModel(hidden=32, heads=2, sequence=32, experts=4).flags(),
    *('--num-layers', '4'),
]
# The clip is far below the gradient norm, so it acts in every step; the rate warms up and decays.
TRAINING = """--micro-batch-size 1 --lr 2e-3 --min-lr 1e-4
 --lr-decay-style cosine --lr-warmup-iters 3 --lr-decay-iters 40 --weight-decay 0.1
 --clip-grad 0.5 --seed 1234 --num-workers 0 --eval-interval 1000 --eval-iters 0 --log-interval 1
 --split 90,5,5 --tokenizer-type NullTokenizer --vocab-size 257""".split()

_UNFLAGGED = {field.name for field in fields(SparseCheckpointConfig) if field not in flagged()}


@pytest.fixture(scope='session')
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for a dataset of real text (the standard library's sources)."""
    from tools import prepare_data

    folder = tmp_path_factory.mktemp('text')
    prefix = folder / 'stdlib'
    assert prepare_data.main(['--output-prefix', str(prefix), '--limit-mb', '1']) == 0
    return ['--data-path', str(prefix), '--data-cache-path', str(folder / 'cache')]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    """A test that fails shows what its jobs said: a CI machine cannot be inspected afterwards."""
    report = yield
    if report.failed:
        for job in item.stash.get(JOBS, []):
            report.sections.append((f'job in {job.directory.name}', job.account()))
    return report


ON_BOTH_BACKENDS = pytest.mark.parametrize(
    'backend', ['gloo', pytest.param(NCCL_LIKE, marks=pytest.mark.thorough)], indirect=True
)
"""For tests of localized recovery: collectives fail as those of gloo do, or as those of NCCL."""


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """What the protected jobs of a test run on, if they do not say otherwise."""
    return getattr(request, 'param', 'gloo')


@pytest.fixture
def cluster(
    text: list[str], tmp_path: Path, request: pytest.FixtureRequest, backend: str
) -> Iterator[Make]:
    """Makes clusters with given extra flags; their host memory is removed afterwards.

    Among the flags may be settings without a flag, as 'max_wait=60'.
    """
    made: list[Cluster] = []
    exactly = request.config.getoption('--exact-memory', False)
    request.node.stash[JOBS] = made

    def make(
        *given: str,
        sparse: bool = True,
        ranks: int = 4,
        nodes: int = 2,
        backend: str = backend,
        exact_memory: bool = exactly,
    ) -> Cluster:
        directory = tmp_path / f'run{len(made)}'
        chosen = backend if sparse else 'gloo'
        exact = exact_memory and sparse
        settings = [one for one in given if one.partition('=')[0] in _UNFLAGGED]
        flags = [flag for flag in given if flag not in settings]
        new = Cluster([], directory, ranks, nodes, backend=chosen, exact_memory=exact)
        new.settings = '\n'.join({one.partition('=')[0]: one for one in settings}.values())
        digest = ['--sparse-ckpt-digest', str(directory / 'digest.json')]
        batch = [] if '--step-batch-size-schedule' in flags else ['--global-batch-size', '4']
        new.flags = [*MODEL, *TRAINING, *batch, *text, *flags, *digest]
        if sparse:
            new.flags += new.sparse_flags()
        if chosen == NCCL_LIKE:
            new.flags += ['--distributed-backend', 'nccl', '--disable-gloo-process-groups']
        made.append(new)
        return new

    yield make
    for one in made:
        one.remove()


@pytest.fixture(scope='session')
def references(text: list[str]) -> References:
    """Digests of fault-free runs of plain Megatron, by number of ranks, stand-in and flags."""
    return References(Path(f'{text[1]}.bin'))


@pytest.fixture
def reference(cluster: Make, references: References) -> Reference:
    """The digest file of a fault-free run of plain Megatron with given flags, and its log lines.

    Others may be given: `stand_in`, a mutation that it runs with; `check`, what its job must be.
    """

    def digest(
        *flags: str,
        ranks: int = 4,
        stand_in: str | None = None,
        check: Callable[[Cluster], None] | None = None,
    ) -> dict:
        def run() -> dict:
            plain = cluster(*flags, sparse=False, ranks=ranks)
            plain.finish(timeout_s=400.0, mutation=stand_in)
            if check is not None:
                check(plain)
            return {**read_digest(plain), LINES: upstream_lines(plain, attempt=0)}

        return references.digest([*MODEL, *TRAINING, *flags], ranks, stand_in, run)

    return digest


@pytest.fixture
def example(cluster: Make) -> Make:
    """Makes jobs of a program in `examples/`, on three stages, with its own flags."""

    def make(program: str, *flags: str) -> Cluster:
        job = cluster(ranks=3, nodes=3)
        job.program = f'examples.{program}'
        job.flags = [*flags, '--dir', str(job.memory.parent), '--run-id', job.name]
        job.flags += ['--events', str(job.directory / 'events')]
        job.flags += ['--digest', str(job.directory / 'digest.json')]
        return job

    return make


@pytest.fixture(scope='module')
def undisturbed() -> dict[str, dict]:
    """Digest of a run of the module's example that nothing happened to, once there is one."""
    return {}


def digest_of_undisturbed(job: Cluster, undisturbed: dict[str, dict]) -> dict:
    """That digest; `job` is run if there is none yet."""
    if not undisturbed:
        assert job.survive() == {}
        undisturbed['digest'] = read_digest(job)
    return undisturbed['digest']


def read_digest(finished: Cluster) -> dict:
    """What the run wrote at its end."""
    return json.loads((finished.directory / 'digest.json').read_text())


def differences(left: dict, right: dict) -> list[str]:
    """Names of everything that differs between two digests, with its rank."""
    found = []
    for rank, entries in left['ranks'].items():
        other = right['ranks'][rank]
        assert entries.keys() == other.keys()
        found += [f'rank {rank}: {name}' for name in entries if entries[name] != other[name]]
    assert left['iteration'] == right['iteration']
    return found


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs that windows do not fit in."""
    with mounted_tmpfs(tmp_path / 'small', '1m') as path:
        yield path


@pytest.fixture
def limited_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs that windows fit in, and that a test can fill."""
    with mounted_tmpfs(tmp_path / 'limited', '64m') as path:
        yield path


@contextmanager
def mounted_tmpfs(path: Path, size: str) -> Iterator[Path]:
    """A real tmpfs of its own; the test is skipped where mounting is not allowed."""
    path.mkdir()
    made = subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(path)], capture_output=True
    )
    if made.returncode != 0:
        pytest.skip(f'no tmpfs can be mounted here: {made.stderr.decode().strip()}')
    try:
        yield path
    finally:
        subprocess.run(['umount', '--lazy', str(path)], check=True)
