# SPDX-License-Identifier: Apache-2.0
"""Checks: one rank and a model that fills some of the GPU: cost of windows, exact recovery."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from tests.gpu.jobs.findings import Findings, Settings
from tests.gpu.jobs.training import Kill, Trials, compare, costs, iteration_ms, reduced
from tools.lab import models, precisions
from tools.lab.evidence import Tier
from tools.lab.job import Trained

WINDOW = 4
ITERATIONS = 20
KILL = Kill(rank=0, after=11)
# Share of an iteration, with the window that `auto` chooses.
_MOST_EXPOSED = 0.01

_LARGE = models.ToyModel(hidden=1024, heads=16, sequence=1024, experts=8)
# 0.3 G parameters.
_LARGE_LAYERS = 10
_TINY = models.ToyModel(hidden=32, heads=2, sequence=32, experts=4)
_TINY_LAYERS = 1
_TRAINING = (
    '--untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer '
    '--micro-batch-size 2 --global-batch-size 16 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 2 '
    '--lr-decay-iters 100 --clip-grad 1.0'
).split()


_TRANSFORMER_ENGINE = ['--transformer-impl', 'transformer_engine', '--moe-grouped-gemm']

# With experts of a fixed size, so that the host reads nothing from the device in between.
_RECORDED = (
    '--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad --rerun-mode disabled '
    '--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity'
).split()


def run(settings: Settings) -> Iterator[Findings]:
    """Train plain, with windows, a kill, one queue for copies, and window `auto`."""
    trials = _trials(settings, 'one-rank', [])
    plain, windows = yield from _same_bits(trials)
    # As tensor parallelism requires on Hopper; torch's default is 8.
    one_queue = trials._replace(variables={'CUDA_DEVICE_MAX_CONNECTIONS': '1'})
    queued = one_queue.protected('one-connection')
    yield Findings(
        {'one_connection_ms': iteration_ms(queued)},
        compare(windows, queued, 'with one connection') + reduced(queued),
    )
    auto = trials._replace(window='auto').protected('auto')
    problems = compare(windows, auto, 'with window auto') + reduced(auto)
    if settings.gpu:
        problems += judge_costs(costs(plain, auto))
    figures = {f'auto_{name}': figure for name, figure in costs(plain, auto).items()}
    del figures['auto_plain_ms']
    figures['auto_window'] = auto.log.captured[-1].window
    yield Findings(figures, problems)


def run_recorded(settings: Settings) -> Iterator[Findings]:
    """Run the trials with all passes of an iteration recorded as one CUDA graph."""
    yield from _same_bits(_trials(settings, 'recorded', _RECORDED))


def run_transformer_engine(settings: Settings) -> Iterator[Findings]:
    """Run the trials with Transformer Engine's layers and optimizer, experts in one module."""
    yield from _same_bits(_trials(settings, 'transformer-engine', _TRANSFORMER_ENGINE))


def run_precision(name: str, settings: Settings) -> Iterator[Findings]:
    """Train one of `precisions.FLAGS` with windows, and a kill. On a CPU with stand-ins."""
    own = [flag for flag in _flags(settings) if flag != '--bf16']  # the precision has its own flag
    engine = _TRANSFORMER_ENGINE if settings.gpu else []
    flags = [*own, *precisions.FLAGS[name].split(), *engine]
    folder = settings.folder(f'precision-{name}')
    program = precisions.program(stand_ins=not settings.gpu)
    trials = Trials(settings, folder, flags, nodes=1, window=WINDOW, program_file=program)
    windows = trials.protected('windows')
    yield Findings({'loss': windows.log.iterations[-1].loss}, reduced(windows))
    yield _killed(trials, windows)


def judge_costs(figures: dict[str, Any]) -> list[str]:
    """Problems in the costs of windows, from the figures of `costs`."""
    share = figures['exposed_ms'] / figures['plain_ms']
    if share <= _MOST_EXPOSED:
        return []
    return [f'with window auto {share:.1%} of an iteration are exposed, more than 1 %']


def _trials(settings: Settings, name: str, more: Sequence[str]) -> Trials:
    flags = [*_flags(settings), *more]  # the last value of a flag counts
    return Trials(settings, settings.folder(name), flags, nodes=1, window=WINDOW)


def _same_bits(trials: Trials) -> Generator[Findings, None, tuple[Trained, Trained]]:
    """Compare a job that loses its rank with one that does not; returns plain, protected training.

    Plain Megatron is no reference: with windows, compiled functions draw the random numbers of
    uncompiled ones.
    """
    plain, windows = trials.plain('plain'), trials.protected('windows')
    yield Findings(
        costs(plain, windows) | {'as_plain': not compare(plain, windows, 'with windows')},
        reduced(windows),
    )
    yield _killed(trials, windows)
    return plain, windows


def _killed(trials: Trials, windows: Trained) -> Findings:
    """Findings of a job that loses its rank."""
    killed = trials.protected('killed', KILL)
    problems = compare(windows, killed, 'killed') + reduced(killed) + _not_back(killed)
    return Findings(_return(windows, killed), problems)


def _not_back(killed: Trained) -> list[str]:
    found = killed.recovery
    if found is None or found.tier is Tier.DISK:
        return ['killed: it did not come back from host memory']
    return []


def _return(windows: Trained, killed: Trained) -> dict[str, Any]:
    """Figures of captured, compared and recomputed state."""
    found = killed.recovery
    return {
        'slot_mib': max(captured.nbytes for captured in killed.log.captured) / (1 << 20),
        'entries_compared': len(windows.state.ranks['0']),
        'came_back': str(found.tier) if found else 'no',
        'replayed': found.replayed if found else 0,
    }


def _flags(settings: Settings) -> list[str]:
    model, layers = (_LARGE, _LARGE_LAYERS) if settings.gpu else (_TINY, _TINY_LAYERS)
    data = models.prepare_text(settings.output / 'data', megabytes=1)
    return model.training_flags([*_TRAINING, '--num-layers', str(layers)], data, ITERATIONS)
