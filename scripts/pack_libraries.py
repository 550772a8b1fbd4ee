# SPDX-License-Identifier: Apache-2.0
"""Packs a folder of Python packages with device code of one GPU architecture, small enough to send.

    python scripts/pack_libraries.py SITE FILE.tar.xz --arch 90

The libraries of Transformer Engine have device code of eight architectures. This tool copies them
and overwrites PTX and all code of other architectures than `--arch` with zeros, which keeps all
offsets and takes no space in the packed file. (`nvprune` of the CUDA toolkit refuses shared
libraries.) Files for compilation and tests are left out. `cuobjdump --list-elf` shows the device
code of a library.
"""

import argparse
import mmap
import shutil
import struct
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

MOST_BYTES = 64 << 20
"""Size limit of a packed file."""
_LEFT_OUT = ('include', '__pycache__', 'onnx/backend/test')
_CONTAINER = struct.Struct('<IHHQ')  # magic, version, header bytes, content bytes
_MAGIC = 0xBA55ED50
_ENTRY = struct.Struct('<HHIQ12xI')  # kind, version, header bytes, content bytes, architecture
_ELF = 2
_KINDS = (1, _ELF)


def keep_one(library: Path, arch: int) -> Counter[int]:
    """Overwrite device code of other architectures, and PTX, in place.

    Returns:
        Bytes of the remaining device code, by architecture; empty without device code.
    """
    kept: Counter[int] = Counter()
    with library.open('r+b') as file, mmap.mmap(file.fileno(), 0) as content:
        at = 0
        while (at := content.find(struct.pack('<I', _MAGIC), at)) >= 0:
            end = _container_end(content, at)
            if end is None:
                at += 4
                continue
            _keep_one_of(content, at + _CONTAINER.size, end, arch, kept)
            at = end
    return kept


def _container_end(content: mmap.mmap, at: int) -> int | None:
    """End of the container that begins at `at`; None if none begins there."""
    if at + _CONTAINER.size > len(content):
        return None
    _, version, header, nbytes = _CONTAINER.unpack_from(content, at)
    end = at + header + nbytes
    return end if (version, header) == (1, _CONTAINER.size) and end <= len(content) else None


def _keep_one_of(content: mmap.mmap, at: int, end: int, arch: int, kept: Counter[int]) -> None:
    while at + _ENTRY.size <= end:
        kind, _, header, nbytes, found = _ENTRY.unpack_from(content, at)
        first, after = at + header, at + header + nbytes
        if kind not in _KINDS or header < _ENTRY.size or after > end:
            return  # an unknown format: the file stays unchanged
        if kind == _ELF and found == arch:
            kept[found] += nbytes
        else:
            content[first:after] = bytes(nbytes)
        at = after


def pack(site: Path, target: Path, arch: int) -> int:
    """Pack the folder `site` for one architecture; returns the size of the file in bytes.

    Raises:
        ValueError: no library has code of that architecture, or the file is too large.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        copy = Path(folder) / 'site'
        shutil.copytree(site, copy, ignore=_ignored(site), symlinks=True)
        kept: Counter[int] = Counter()
        for library in sorted(copy.rglob('*.so*')):
            if library.is_file() and not library.is_symlink() and library.stat().st_size:
                kept += keep_one(library, arch)
        if not kept:
            raise ValueError(f'no library in {site} has device code of sm_{arch}')
        part = Path(folder) / 'part'
        with tarfile.open(part, 'w:xz', preset=6) as archive:
            archive.add(copy, 'site')
        nbytes = part.stat().st_size
        if nbytes > MOST_BYTES:
            raise ValueError(f'{nbytes / 2**20:.1f} MiB packed, of which 64 can be sent')
        part.rename(target)
    return nbytes


def _ignored(site: Path) -> Callable[[str, list[str]], set[str]]:
    def ignored(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(site)
        return {
            name
            for name in names
            if any(f'/{inside / name}'.endswith(f'/{left_out}') for left_out in _LEFT_OUT)
        }

    return ignored


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('site', type=Path, help='folder of packages')
    parser.add_argument('target', type=Path, help='file to write, .tar.xz')
    parser.add_argument('--arch', type=int, required=True, help='such as 90, for an H100')
    args = parser.parse_args(arguments)
    try:
        nbytes = pack(args.site, args.target.absolute(), args.arch)
    except (OSError, ValueError) as error:
        print(f'pack_libraries: {error}', file=sys.stderr)
        return 1
    print(f'{args.target}: {nbytes / 2**20:.1f} MiB')
    return 0


if __name__ == '__main__':
    sys.exit(main())
