# SPDX-License-Identifier: Apache-2.0
"""The result of the demo, for people (a table) and for programs (one line)."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tools.demo import costs
from tools.demo.costs import CapturedBytes
from tools.demo.localized import PHASES, LocalizedRecovery
from tools.lab.run_log import RunLog

MIB = 1 << 20


@dataclass(frozen=True)
class Result:
    """What was found."""

    bit_identical: bool
    plain: RunLog
    sparse: RunLog
    killed_at: float
    """Seconds since the epoch."""
    recovery: LocalizedRecovery
    captured: dict[int, CapturedBytes]

    @property
    def overhead(self) -> float:
        """Median iteration time with sparse checkpointing over that without."""
        without, with_it = costs.overhead(self.plain, self.sparse, self.killed_at)
        return with_it / without

    def line(self) -> str:
        """The last line of the demo, for programs."""
        return (
            f'demo: bit_identical={str(self.bit_identical).lower()} '
            f'replayed={self.recovery.replayed} recovery_s={self.recovery.seconds:.1f} '
            f'(starting processes {self.recovery.starting:.1f}, '
            f'replaying {self.recovery.replaying:.1f}) '
            f'overhead={self.overhead:.3f} '
            f'slot_over_dense={costs.slot_over_dense(self.captured):.3f}'
        )


def print_summary(result: Result, digests: tuple[str, str], console: Console) -> None:
    """Print the tables.

    Args:
        result: what was found.
        digests: of the final state of the fault-free and of the recovered run.
        console: where to.
    """
    table = Table(title='Fault-free run against the run that lost a node', title_justify='left')
    table.add_column('')
    table.add_column('fault-free', justify='right')
    table.add_column('recovered', justify='right')
    for row in _rows(result, digests):
        table.add_row(*row)
    console.print()
    console.print(table)
    console.print()
    console.print(_stage_table(result.recovery))


def _stage_table(recovery: LocalizedRecovery) -> Table:
    table = Table(title='Recovery by pipeline stage', title_justify='left')
    table.add_column('')
    for stage in range(len(recovery.stages)):
        fate = 'lost' if stage == recovery.lost else 'kept its state'
        table.add_column(f'stage {stage} ({fate})', justify='right')
    table.add_row('iterations replayed', *(str(stage.replayed) for stage in recovery.stages))
    table.add_section()
    for name in PHASES:
        seconds = [f'{stage.phases[name]:.2f}' for stage in recovery.stages]
        table.add_row(f'{name.replace("_", " ")} (s)', *seconds)
    return table


def _rows(result: Result, digests: tuple[str, str]) -> list[tuple[str, str, str]]:
    plain, sparse = result.plain.iterations, result.sparse.iterations
    without, with_it = costs.overhead(result.plain, result.sparse, result.killed_at)
    replayed = ', '.join(
        f'{stage.replayed} (stage {number})' for number, stage in enumerate(result.recovery.stages)
    )
    slot = costs.slot_over_dense(result.captured)
    dense = sum(rank.dense for rank in result.captured.values())
    verdict = '[bold green]equal[/]' if result.bit_identical else '[bold red]DIFFERENT[/]'
    return [
        ('first loss', f'{plain[0].loss:.4f}', f'{sparse[0].loss:.4f}'),
        ('final loss', f'{plain[-1].loss:.4f}', f'{sparse[-1].loss:.4f}'),
        ('digest of the final state', digests[0][:12], f'{digests[1][:12]}  {verdict}'),
        ('iterations replayed', '-', replayed),
        ('seconds, kill to new iteration', '-', f'{result.recovery.seconds:.1f}'),
        (
            'median iteration (ms)',
            f'{without:.0f}',
            f'{with_it:.0f}  ({result.overhead - 1:+.1%})',
        ),
        (
            'bytes a checkpoint (all ranks)',
            f'{dense / MIB:.2f} MiB dense',
            f'{slot * dense / MIB:.2f} MiB a slot  ({slot:.0%})',
        ),
    ]
