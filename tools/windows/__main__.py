# SPDX-License-Identifier: Apache-2.0
r"""Lists, verifies, deletes, exports and tries windows in host memory and on disk.

    moevement windows list /dev/shm/moevement-1000
    moevement windows verify /lustre/windows/my-run
    moevement windows prune /dev/shm/moevement-1000 --yes
    moevement windows export /lustre/windows/my-run --to torch_dist --output DENSE -- \
        torchrun --nproc-per-node 8 pretrain_gpt.py <flags of the run>
    moevement windows export /lustre/windows/my-run --to torch_dist --output DENSE \
        --offline -- <flags of the run>
    moevement windows check /lustre/windows/my-run --nproc 4 -- <flags of the next start>

DIR is a directory of `--sparse-ckpt-dir` or `--sparse-ckpt-disk`, or one below it. Host memory is
that of this node. `list` reads headers; `verify` also reads payloads, and compares every checksum.
`prune` lists files to delete, and deletes them with --yes: windows and logs of runs without a live
process on this node, except undamaged windows in memory, and on disk the newest that are complete
on the ranks seen there. `export` launches a run that has ended once more, with the command after
`--`: the run converts its newest window, trains one iteration and saves Megatron's own checkpoint,
which another layout can load as far as upstream's loader allows. The windows that it reads stay;
`prune` deletes them. With --offline this process makes the checkpoint, on a CPU, from files of all
ranks below DIR; windows must have one slot. `check` reports for each window whether a job with the
flags after `--` would resume from it, in its layout or another one, and starts nothing.

Exit status: 0 done, 1 a window is damaged, there is none to verify, the export failed or no window
would be taken, 2 the directory or a window cannot be read by this user.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table

from moevement_ext.memory.window.refusal import UnreadableWindow
from moevement_ext.memory.window.settings import Layout

from ..lab.arguments import Parser, at_least, split_at_end
from ..lab.errors import LabError
from ..lab.figures import print_json
from ..lab.text import size
from .export import TORCH_DIST, export, source
from .found import Found, complete, find
from .pruning import live_runs, prunable, remove

_KEEP = 2
_WIDE = 100
_ONLY_WIDE = ('slots', 'held by', 'state')
_OF_A_RUN = ('export', 'check')


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    if not args.directory.is_dir():
        print(
            f'windows: {args.directory} is no directory; give that of --sparse-ckpt-dir or '
            '--sparse-ckpt-disk',
            file=sys.stderr,
        )
        return 2
    try:
        return _run(args)
    except (OSError, UnreadableWindow) as error:
        said = str(error)
        if isinstance(error, OSError):
            said = f'{error.filename or args.directory}: {error.strerror}'
        print(f'windows: {said}; run as the user of the job', file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    found = find(args.directory, verify=args.command == 'verify')
    if args.command == 'export':
        return _export(found, args)
    if args.command == 'check':
        return _check(found, args)
    if args.command == 'prune':
        return _prune(found, args)
    if args.json:
        print_json(_as_json(found))
    else:
        _print(found, args.directory, Console())
    committed = [one for one in found if one.state == 'committed']
    if any(one.foreign for one in found):
        return 2
    none_to_verify = args.command == 'verify' and not committed
    return int(none_to_verify or any(one.problem is not None for one in committed))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog='moevement windows', description=__doc__)
    commands = parser.add_subparsers(dest='command', required=True)
    listing, verifying, pruning, exporting, checking = (
        commands.add_parser(name, help=about)
        for name, about in (
            ('list', 'what lies where'),
            ('verify', 'list windows, and compare every checksum'),
            ('prune', 'delete files that no recovery needs'),
            ('export', 'make a dense checkpoint of the newest window'),
            ('check', 'report whether a job would resume from them'),
        )
    )
    for command in (listing, verifying, pruning, exporting, checking):
        command.add_argument('directory', type=Path, metavar='DIR')
    for command in (listing, verifying):
        command.add_argument('--json', action='store_true')
    pruning.add_argument(
        '--keep', type=at_least(0), default=_KEEP, metavar='N',
        help=f'complete windows of each run that stay on disk ({_KEEP}); 0: nothing stays',
    )  # fmt: skip
    pruning.add_argument('--yes', action='store_true', help='delete the files')
    exporting.add_argument('--to', choices=[TORCH_DIST], required=True, help='format')
    exporting.add_argument('--output', type=Path, required=True, metavar='DIR', help='for --load')
    exporting.add_argument(
        '--offline', action='store_true',
        help='in this process, for any layout: after -- come flags of pretrain_gpt.py alone',
    )  # fmt: skip
    checking.add_argument(
        '--nproc', type=at_least(0), metavar='N',
        help='ranks of the job; default: as many as the windows had, or the fewest for the flags',
    )  # fmt: skip
    own, launch = split_at_end(argv)
    args = parser.parse_args(own)
    args.launch = launch
    if bool(args.launch) != (args.command in _OF_A_RUN):
        needed = 'put -- and the command that launches the run, or its flags, after the others'
        surplus = f'leave out -- and what follows: it is for {" and ".join(_OF_A_RUN)}'
        parser.error(f'{args.command}: {surplus if args.launch else needed}')
    return args


def _export(found: Sequence[Found], args: argparse.Namespace) -> int:
    try:
        if args.offline:
            from .offline import export_offline, newest  # imports torch

            window = newest(found, args.directory)
            run, iteration = window[0].run, export_offline(window, args.output, args.launch)
        else:
            windows = source(found, args.directory)
            run, iteration = windows.run, export(windows, args.output, args.launch)
    except LabError as error:
        print(f'windows: {error}', file=sys.stderr)
        return 1
    print(f'{run}: iteration {iteration} is in {args.output}; go on with --load')
    return 0


def _check(found: Sequence[Found], args: argparse.Namespace) -> int:
    from .trial import said_of  # imports torch

    for one in found:
        if one.state == 'committed' and one.problem is not None:
            print(f'{one.path}: {one.problem}')
    answers = list(said_of(found, args.launch, args.nproc))
    for said in answers:
        print(said)
    if not answers:
        print(f'no windows in {args.directory}')
    return int(not any(said.loads for said in answers))


def _as_json(found: Sequence[Found]) -> dict[str, Any]:
    files = [
        {name: _plain(value) for name, value in msgspec.structs.asdict(one).items()}
        for one in found
    ]
    whole = {_plain(run): windows for run, windows in complete(found).items()}
    return {'files': files, 'complete': whole}


def _plain(value: Any) -> Any:
    """With question marks for bytes of a path that are not UTF-8."""
    if isinstance(value, Path | Layout):
        value = str(value)
    return os.fsencode(value).decode(errors='replace') if isinstance(value, str) else value


def _print(found: Sequence[Found], directory: Path, console: Console) -> None:
    """Print all columns if they fit; else drop the least important ones."""
    if not found:
        console.print(f'no windows in {directory}', highlight=False, soft_wrap=True)
        return
    wide = console.width >= _WIDE
    shown = Table(box=HEAVY_HEAD if wide else None, pad_edge=False)
    rows = [_cells(one, wide) for one in found]
    columns = [name for name in rows[0] if wide or name not in _ONLY_WIDE]
    for name in columns:
        right = name in ('rank', 'slots', 'size')
        shown.add_column(name, justify='right' if right else 'left', overflow='fold')
    for row in rows:
        shown.add_row(*(row[name] for name in columns))
    console.print(shown)
    for run, windows in complete(found).items():
        ranks = len({one.rank for one in found if one.run == run})
        newest = ', '.join(windows) if windows else 'none'
        console.print(f'{run}: whole on all {ranks} ranks seen here: {newest}', highlight=False)


def _cells(one: Found, wide: bool) -> dict[str, str]:
    checked = 'right' if one.verified else 'headers right' if one.slots else ''
    if one.state != 'committed' and not wide:  # there is no column of states
        checked = one.state
    return {
        'run': one.run, 'rank': str(one.rank), 'window': one.window,
        'slots': '' if one.slots is None else str(one.slots), 'size': size(one.nbytes),
        'held by': one.held_by, 'state': one.state, 'checksums': one.problem or checked,
    }  # fmt: skip


def _prune(found: Sequence[Found], args: argparse.Namespace) -> int:
    live = live_runs(found)
    files = prunable(found, live, args.keep)
    unread = [one for one in found if one.foreign and one.path not in files]
    for one in unread:
        print(f'windows: {one.path}: {one.problem}', file=sys.stderr)
    for run in live:
        print(f'{run}: a process of this run is alive: nothing is deleted')
    freed = size(sum(path.stat().st_blocks * 512 for path in files if path.exists()))
    if args.yes:
        remove(files, args.directory)
        print(f'deleted: {len(files)} files, {freed}')
        return 2 if unread else 0
    for path in files:
        print(path)
    print(f'would delete: {len(files)} files, {freed}; with --yes it does')
    return 2 if unread else 0


if __name__ == '__main__':
    sys.exit(main())
