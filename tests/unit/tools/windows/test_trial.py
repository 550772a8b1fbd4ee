# SPDX-License-Identifier: Apache-2.0
"""What is said of windows before a job in some layout is started on them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron.moevement.seams import cpu_device

cpu_device.install()

from megatron.moevement.checking import validated  # noqa: E402
from megatron.moevement.job import identity  # noqa: E402
from moevement_ext.config import SparseCheckpointConfig  # noqa: E402
from moevement_ext.memory.window import settings  # noqa: E402
from moevement_ext.memory.window.file import WindowFile  # noqa: E402
from tests.unit.memory.samples import capacity, content, make_header, named  # noqa: E402
from tools.windows.__main__ import main  # noqa: E402

RUN = 'my-run'
MODEL = (
    '--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --bf16 '
    '--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 8 --num-experts 4 '
    '--distributed-backend gloo --use-distributed-optimizer --sparse-ckpt --vocab-size 250 '
    '--tokenizer-type NullTokenizer --disable-bias-linear'
).split()
LAYOUT = '--pipeline-model-parallel-size 2 --expert-model-parallel-size 2'.split()
ELASTIC = ['--sparse-ckpt-elastic', 'restart']
RANKS = 4
TENSOR_PARALLEL = '--tensor-model-parallel-size 2 --sequence-parallel --swiglu'.split()
ETP_1, ETP_2 = ([*TENSOR_PARALLEL, '--expert-tensor-parallel-size', size] for size in ('1', '2'))
INTERLEAVED = ['--moe-mlp-glu-interleave-size', '16']
CYCLIC, SHARED = ['--dataloader-type', 'cyclic'], '--no-data-sharding'

Capture = Callable[..., Path]


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    """Writes windows of a job; returns the directory of its run."""

    def write(
        start: int, slots: int = 1, owners: range = range(RANKS), flags: Sequence[str] = LAYOUT
    ) -> Path:
        args = validated([*MODEL, *flags], RANKS)
        args.padded_vocab_size = 256
        for owner in owners:
            stamp = identity.rank_identity(vars(args), owner, SparseCheckpointConfig(run_id=RUN))
            folder = tmp_path / RUN / 'node0' / str(owner) / str(owner)
            folder.mkdir(parents=True, exist_ok=True)
            file = WindowFile.create(
                folder / f'window-{named(start)}.window', capacity() + 2 * settings.MAX_BYTES
            )
            file.begin(named(start))
            for slot in range(slots):
                header = make_header(slot, start, owner=owner, window=slots)
                header.run, header.topology = stamp.run, stamp.topology
                header.placed = stamp.placed
                header.settings = b'' if slot else settings.encode(stamp.settings)
                file.reserve_slot(slot, header.payload_bytes)[:] = content(header)
                file.seal_slot(header)
        return tmp_path / RUN

    return write


def tried(
    capsys: pytest.CaptureFixture[str], directory: Path, *flags: str, ranks: int | None = None
) -> tuple[int, list[str]]:
    """Status, and the lines said."""
    number = [] if ranks is None else ['--nproc', str(ranks)]
    capsys.readouterr()
    where = ['--sparse-ckpt-dir', str(directory.parent), '--sparse-ckpt-run-id', RUN]
    status = main(['check', str(directory), *number, '--', *MODEL, *where, *flags])
    return status, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ('slots', 'flags', 'ranks', 'status', 'said'),
    [
        (1, [], 2, 1, ['no, it is of 4 ranks (PP 2, DP 2, EP 2', '--sparse-ckpt-elastic restart']),
        (1, ELASTIC, 2, 0, ['goes on, in another layout, bit for bit: it is of 4 ranks', '2 ra']),
        (3, ELASTIC, 8, 0, ['goes on, in another layout, equal up to rounding', '8 ranks']),
        (3, [*ELASTIC, '--sparse-ckpt-elastic-exact'], 8, 1, ['no, --sparse-ckpt-elastic-exact']),
        (1, [*ELASTIC, '--tensor-model-parallel-size', '2', '--sequence-parallel'], 2, 1,
         ['are divided by --tensor-model-parallel-size 1, and this job by 2']),
        (1, [*LAYOUT, '--lr', '1', '--seed', '5'], 4, 1,
         ['no, it is of another training: --lr: was None, is 1.0; --seed: was 1234, is 5']),
        (1, [*LAYOUT, '--sparse-ckpt-run-id', 'other'], 4, 1, [f'the run is called {RUN}']),
        (1, [*LAYOUT, '--sparse-ckpt-dir', '/dev/shm/other'], 4, 1,
         ['no, the start would not look there: give --sparse-ckpt-dir /']),
        (1, [*LAYOUT, *ELASTIC, '--sparse-ckpt-elastic-layouts', 'pp=1'], 3, 1,
         ['no, --sparse-ckpt-elastic-layouts: no layout', 'Start 2 ranks']),
        (1, LAYOUT, 6, 1, ['no, Megatron ends with']),
        (1, [*LAYOUT, '--optimizer', 'sgd'], 4, 1, ['no, the job would not start: --sparse-ckpt']),
    ],
)  # fmt: skip
def test_other_layouts_continue_or_are_refused_with_a_reason(
    slots: int,
    flags: list[str],
    ranks: int,
    status: int,
    said: list[str],
    capture: Capture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, (line,) = tried(capsys, capture(4, slots), *flags, ranks=ranks)
    assert found == status
    assert all(part in line for part in said), line


@pytest.mark.parametrize('slurm', [None, '456'])
def test_start_under_another_name_does_not_find_the_run(
    slurm: str | None,
    capture: Capture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv('SLURM_JOB_ID', raising=False)
    if slurm is not None:
        monkeypatch.setenv('SLURM_JOB_ID', slurm)
    directory = capture(4)
    assert main(['check', str(directory), '--', *MODEL, *LAYOUT]) == 1
    start = 'run-' if slurm is None else 'slurm-456: '
    assert f'no, the run is called {RUN}, and a start from here would be {start}' in (
        said := capsys.readouterr().out
    )
    assert said.endswith(f'give --sparse-ckpt-run-id {RUN}\n')


def test_a_damaged_file_is_named(capture: Capture, capsys: pytest.CaptureFixture[str]) -> None:
    directory = capture(4)
    path = next(directory.rglob('2/2/window-*'))
    with open(path, 'r+b') as file:
        file.truncate(100)
    found, lines = tried(capsys, directory, *LAYOUT)
    assert found == 1
    assert lines[0].startswith(f'{path}: 100 bytes')
    assert lines[1] == f'{RUN}, window 4-plan1: no, there is none of the ranks 2 here'


@pytest.mark.parametrize(
    ('captured', 'flags', 'ranks', 'said'),
    [
        (ETP_1, ETP_2, 4, 'goes on, in another layout, bit for bit'),
        ([*ETP_1, *INTERLEAVED], [*ETP_2, *INTERLEAVED], 4,
         'no, --moe-mlp-glu-interleave-size mixes the rows of experts: start with '
         '--expert-tensor-parallel-size 1'),
        (CYCLIC, CYCLIC, 2, 'no, --dataloader-type cyclic shuffles'),
        ([*CYCLIC, SHARED], [*CYCLIC, SHARED], 2, 'goes on, in another layout'),
    ],
)  # fmt: skip
def test_window_that_a_restart_would_refuse_is_refused(
    captured: list[str],
    flags: list[str],
    ranks: int,
    said: str,
    capture: Capture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = capture(4, flags=captured)
    _, (line,) = tried(capsys, directory, *ELASTIC, *flags, ranks=ranks)
    assert said in line
