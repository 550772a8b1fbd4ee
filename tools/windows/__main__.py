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
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from moevement_ext.memory.window.format import Expected
from moevement_ext.memory.window.reader import WindowReader
from moevement_ext.memory.window.refusal import UnreadableWindow

from ..lab.programs import FLAGS, LabError, Parser, add_flags, split_at_end
from ..lab.tables import size, table
from ..lab.trainer_flags import prepare_megatron
from .export import export
from .found import DISK, Found, by_run, by_window, complete, find, missing
from .pruning import live_runs, prunable, remove

_LEAST_WIDTH = 160
_COMMANDS = {
    'list': 'what lies where',
    'verify': 'list windows, and compare every checksum',
    'prune': 'delete files that no recovery needs',
    'export': 'make a dense checkpoint of the newest window',
    'check': 'report whether a job would resume from them',
}
_OF_A_RUN = ('export', 'check')


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    directory: Path = args.directory
    try:
        if not directory.is_dir():
            raise FileNotFoundError(0, 'no directory', str(directory))
        run = {'export': _export, 'check': _check, 'prune': _prune}.get(args.command, _list)
        return run(find(directory, verify=args.command == 'verify'), args)
    except LabError as error:
        print(f'windows: {error}', file=sys.stderr)
        return 1
    except FileNotFoundError as error:
        where = f'{error.filename}: {error.strerror}'
        text = f'{where}; give that of --sparse-ckpt-dir or --sparse-ckpt-disk'
    except OSError as error:
        text = f'{error.filename or directory}: {error.strerror}; run as the user of the job'
    except UnreadableWindow as error:
        text = f'{error}; run as the user of the job'
    print(f'windows: {text}', file=sys.stderr)
    return 2


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog='moevement windows', description=__doc__)
    commands = parser.add_subparsers(dest='command', required=True)

    for name, about in _COMMANDS.items():
        add_flags(commands.add_parser(name, help=about), FLAGS[f'windows {name}'])
    own, launch = split_at_end(argv)
    args = parser.parse_args(own)
    args.launch = launch
    if bool(launch) != (args.command in _OF_A_RUN):
        needed = 'put -- and the command that launches the run, or its flags, after the others'
        surplus = f'leave out -- and what follows: it is for {" and ".join(_OF_A_RUN)}'
        parser.error(f'{args.command}: {surplus if launch else needed}')
    return args


def _list(found: Sequence[Found], args: argparse.Namespace) -> int:
    if args.json:
        files = [msgspec.structs.asdict(one) for one in found]
        print(json.dumps({'files': files, 'complete': complete(found)}, indent=2, default=str))
    else:
        _print(found, args.directory)
    if any(one.foreign for one in found):
        return 2
    committed = [one for one in found if one.state == 'committed']
    none_to_verify = args.command == 'verify' and not committed
    return int(none_to_verify or any(one.problem is not None for one in committed))


def _print(found: Sequence[Found], directory: Path) -> None:
    if not found:
        print(f'no windows in {directory}')
        return
    # At the width of a narrow terminal, rich would cut the columns.
    console = Console(width=max(Console().width, _LEAST_WIDTH), soft_wrap=True)
    columns = ('run', '>rank', 'window', '>slots', '>size', 'held by', 'state', 'checksums')
    console.print(table(columns, map(_cells, found)))
    for run, windows in complete(found).items():
        ranks = len({one.rank for one in found if one.run == run})
        print(f'{run}: whole on all {ranks} ranks seen here: {", ".join(windows) or "none"}')


def _cells(one: Found) -> tuple[str, ...]:
    slots = '' if one.slots is None else str(one.slots)
    checked = 'right' if one.verified else 'headers right' if one.slots else ''
    named = one.run, str(one.rank), one.window, slots
    return *named, size(one.nbytes), one.held_by, one.state, one.problem or checked


def _export(found: Sequence[Found], args: argparse.Namespace) -> int:
    run, iteration = export(found, args.directory, args.output, args.launch, args.offline)
    print(f'{run}: iteration {iteration} is in {args.output}; go on with --load')
    return 0


def _check(found: Sequence[Found], args: argparse.Namespace) -> int:
    for one in found:
        if one.state == 'committed' and one.problem is not None:
            print(f'{one.path}: {one.problem}')
    windows = [files for own in by_run(found).values() for files in by_window(own)]
    if not windows:
        print(f'no windows in {args.directory}')
    prepare_megatron()
    loads = [_would_load(files, args.launch, args.nproc) for files in windows]
    return int(not any(loads))


def _would_load(files: Sequence[Found], flags: Sequence[str], ranks: int | None) -> bool:
    """Print whether a job would resume from a window.

    `ranks` None: the number of ranks that the window had, or else the fewest for the flags.
    """
    first, absent = files[0], missing(files)
    loads, text = False, f'there is none of the ranks {", ".join(map(str, absent))} here'
    if not absent:
        with WindowReader(first.path) as reader:
            header = reader.verify_identity(Expected())[0]
        with warnings.catch_warnings(action='ignore'):  # of packages that only training needs
            from megatron.moevement.offline.run_flags import answer

            loads, text = answer(header, flags, ranks, first.root, first.tier == DISK)
    print(f'{first.run}, window {first.window}: {"goes on" if loads else "no"}, {text}')
    return loads


def _prune(found: Sequence[Found], args: argparse.Namespace) -> int:
    if not found:
        _print(found, args.directory)
        return 0
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
    else:
        print(*files, f'would delete: {len(files)} files, {freed}; with --yes it does', sep='\n')
    return 2 if unread else 0


if __name__ == '__main__':
    sys.exit(main())
