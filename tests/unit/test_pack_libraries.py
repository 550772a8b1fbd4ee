# SPDX-License-Identifier: Apache-2.0
"""Packages are packed with device code of one architecture; here, of libraries that are made up."""

import os
import struct
import tarfile
from pathlib import Path

import pytest

from scripts import pack_libraries

ELF, PTX = 2, 1


def entry(kind: int, arch: int, payload: bytes) -> bytes:
    head = struct.pack('<HHIQ12xI', kind, 1, 64, len(payload), arch)
    return head.ljust(64, b'\1') + payload


def container(*entries: bytes) -> bytes:
    content = b''.join(entries)
    return struct.pack('<IHHQ', 0xBA55ED50, 1, 16, len(content)) + content


def library(path: Path, *architectures: int) -> bytes:
    """Two containers among other bytes, one of which looks like the beginning of one."""
    code = [entry(ELF, arch, os.urandom(5000)) for arch in architectures]
    false = struct.pack('<IHHQ', 0xBA55ED50, 1, 16, 1 << 40)
    content = b'host' + container(*code, entry(PTX, 90, b'ptx' * 99)) + false + container(*code)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content + b'end')
    return content + b'end'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / 'site'
    library(site / 'te' / 'libte.so', 80, 90, 100)
    (site / 'te' / 'host.so').write_bytes(b'plain')
    for name in ('te/include/a.h', 'onnx/backend/test/b', 'te/__pycache__/c', 'te.dist-info/RECORD',
                 'onnx/backend/base.py'):  # fmt: skip
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(name)
    return site


def test_other_architectures_are_blanked_and_nothing_moves(tmp_path: Path) -> None:
    path = tmp_path / 'lib.so'
    before = library(path, 80, 90, 100)
    assert pack_libraries.keep_one(path, 90) == {90: 10_000}
    after = path.read_bytes()
    assert len(after) == len(before)
    for start in (before.index(b'host') + 4, before.rindex(struct.pack('<I', 0xBA55ED50))):
        first = start + 16
        for number, kept in enumerate((False, True, False)):
            at = first + number * 5064
            assert after[at : at + 64] == before[at : at + 64], 'headers'
            payload = before[at + 64 : at + 5064] if kept else bytes(5000)
            assert after[at + 64 : at + 5064] == payload
    assert b'ptx' not in after and after.endswith(b'end')


def test_unneeded_files_are_left_out(site: Path, tmp_path: Path) -> None:
    untouched = (site / 'te' / 'libte.so').read_bytes()
    target = tmp_path / 'te.tar.xz'
    assert pack_libraries.main([str(site), str(target), '--arch', '90']) == 0
    with tarfile.open(target) as archive:
        files = {item.name for item in archive if item.isfile()}
    assert files == {
        'site/te/libte.so', 'site/te/host.so', 'site/te.dist-info/RECORD',
        'site/onnx/backend/base.py',
    }  # fmt: skip
    assert (site / 'te' / 'libte.so').read_bytes() == untouched
    assert sorted(path.name for path in tmp_path.iterdir()) == ['site', 'te.tar.xz']


def test_unusable_or_large_package_is_not_written(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / 'te.tar.xz')
    assert pack_libraries.main([str(site), target, '--arch', '75']) == 1
    monkeypatch.setattr(pack_libraries, 'MOST_BYTES', 4000)
    assert pack_libraries.main([str(site), target, '--arch', '90']) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert 'device code of sm_75' in first and 'MiB packed' in second
    assert [path.name for path in tmp_path.iterdir()] == ['site']
