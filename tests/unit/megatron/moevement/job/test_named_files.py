# SPDX-License-Identifier: Apache-2.0
"""The contents of files that flags name are part of the run identity, not only their paths."""

import json
import os
import re
import socket
import struct
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from types import ModuleType

import megatron.core
import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.moevement.job import computing, identity, named_files
from megatron.moevement.job import flags as flags_known
from megatron.moevement.job.named_files import empty_part, missing_data, refuse_missing
from moevement_ext.config import ConfigurationError
from moevement_ext.memory.window.settings import Differences, decode, differences, encode
from tests.support.each import each
from tests.unit.megatron.moevement.job.test_identity import DATA, WORDS, _parser, parsed

NO_FILES = set(WORDS['no_files'])


def launched(*flags: str) -> identity.RunSettings:
    args = parsed(*flags)
    args.rank, args.world_size, args.data_parallel_size = 0, 4, 2
    return identity.run_settings(vars(args), 'run')


def changed(path: Path, content: str, *flags: str) -> Differences:
    before = launched(*flags)
    path.write_text(content)
    return differences(before, launched(*flags))


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Prefix of an indexed dataset of two documents."""
    prefix = tmp_path / 'data'
    write_data(prefix, sequences=2)
    return str(prefix)


def write_data(prefix: Path, sequences: int, token: int = 7) -> None:
    head = struct.pack('<9sQBQQ', b'MMIDIDX\0\0', 1, 4, sequences, sequences + 1)
    Path(f'{prefix}.idx').write_bytes(head + bytes(20 * sequences))
    Path(f'{prefix}.bin').write_bytes(bytes([token]) * 100)


def _of_parser(name: str) -> bool:
    return (
        re.search('path|file|dir|cfg|config|model|load|save|templ|spec|factory|data', name)
        is not None
    )


def test_every_flag_that_may_name_a_file_is_classified() -> None:
    """Fails if upstream adds such a flag: classify whether the file decides bits."""
    known = {*named_files.BLENDS, *named_files.DATA, *named_files.FILES, *named_files.MODULES}
    known |= {*named_files.WRITTEN, *named_files.LARGE}
    takes_text = {
        action.dest
        for action in _parser()._actions
        if action.nargs != 0 and action.type in (None, str) and not action.choices
    }
    found = {name for name in takes_text if _of_parser(name) and flags_known.counts(name)}
    assert found - NO_FILES <= known, sorted(found - NO_FILES - known)
    assert {'tokenizer_model', 'data_args_path', 'spec'} <= found


@pytest.mark.parametrize('name', sorted(set(named_files.FILES) - {'kitchen_config_file'}))
def test_content_of_a_named_file_is_decisive(name: str, tmp_path: Path) -> None:
    path = tmp_path / 'named'
    path.write_text('one')
    flag = named_files._flag(name)
    (line,) = changed(path, 'other', flag, str(path)).decisive
    assert re.fullmatch(rf'{flag} {path}: was 3 bytes, \w+, is 5 bytes, \w+', line)


def test_tokenizer_folder_counts_by_its_content(tmp_path: Path) -> None:
    (tmp_path / 'tokenizer.json').write_text('one')
    flags = '--tokenizer-model', str(tmp_path)
    (line,) = changed(tmp_path / 'tokenizer.json', 'two', *flags).decisive
    assert line.startswith(f'--tokenizer-model {tmp_path}: was 1 files, ')


def test_blend_counts_as_parsed(tmp_path: Path) -> None:
    blend = tmp_path / 'blend.txt'
    blend.write_text('0.7 d 0.3 e')
    flags = '--data-args-path', str(blend)
    assert not changed(blend, ' 0.7 d\n0.3 e\n', *flags)
    (line,) = changed(blend, '0.2 d 0.8 e', *flags).decisive
    assert line == f'--data-args-path {blend}: was 0.7 d 0.3 e, is 0.2 d 0.8 e'


def test_blend_of_each_split_counts_as_parsed(tmp_path: Path) -> None:
    blend = tmp_path / 'blend.json'
    one = {'train': '0.7 d 0.3 e', 'valid': ['v'], 'test': None}
    blend.write_text(json.dumps(one))
    flags = '--per-split-data-args-path', str(blend)
    same = {**one, 'train': one['train'].split()}
    assert not changed(blend, json.dumps(same, indent=2), *flags)
    assert len(changed(blend, json.dumps({**one, 'valid': ['w']}), *flags).decisive) == 1


@pytest.mark.parametrize('named_by', ['--data-path', '--train-data-path', '--data-args-path'])
@pytest.mark.parametrize(
    ('rebuilt', 'files'), [({'sequences': 3}, ['idx']), ({'token': 8}, ['bin'])]
)
def test_rebuilt_data_are_detected(
    named_by: str, rebuilt: dict, files: list[str], data: str, tmp_path: Path
) -> None:
    blend = tmp_path / 'blend.txt'
    blend.write_text(f'1.0 {data}')
    flags = [named_by, *([str(blend)] if named_by == '--data-args-path' else ['1.0', data])]
    before = launched(*flags)
    write_data(Path(data), **{'sequences': 2, **rebuilt})
    lines = differences(before, launched(*flags)).decisive
    assert [line.partition(':')[0] for line in lines] == [f'{data}.{suffix}' for suffix in files]
    if files == ['idx']:
        assert '2 sequences, 3 documents' in lines[0] and '3 sequences, 4 documents' in lines[0]


@pytest.mark.parametrize('suffix', ['.idx', '.bin'])
@pytest.mark.parametrize('at', [0.1, 0.5, 1.0], ids='{:.0%}'.format)
@pytest.mark.parametrize('rest', [0, 10], ids=['alone', 'of ten'])
def test_changed_data_of_equal_size_and_beginning_are_detected(
    suffix: str, at: float, rest: int, data: str, tmp_path: Path
) -> None:
    """For example, an index with another order, or tokens of another vocabulary."""
    path = Path(data + suffix)
    path.write_bytes(path.read_bytes() + bytes(2**17))
    more = [str(tmp_path / f'more{number}') for number in range(rest)]
    flags = '--data-path', *more, data
    before = launched(*flags)
    with open(path, 'r+b') as file:
        file.seek(int(at * (2**17 - 2**15)))
        file.write(b'\1' * 2**15)
    (line,) = differences(before, launched(*flags)).decisive
    assert line.startswith(f'{path}: was ')


def test_few_bytes_of_many_data_files_are_read(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement reads them while all ranks wait."""
    for suffix in '.idx', '.bin':
        Path(data + suffix).write_bytes(bytes(2**17))
    read = []
    pread = os.pread
    monkeypatch.setattr(os, 'pread', lambda *how: read.append(how) or pread(*how))
    links = [f'{data}{number}' for number in range(100)]
    for link in links:
        for suffix in '.idx', '.bin':
            Path(link + suffix).symlink_to(data + suffix)
    named_files.held_by_files({'data_path': links})
    assert len(read) == 200


def test_data_missing_on_a_rank_are_no_difference(data: str) -> None:
    before = launched('--data-path', data)
    for suffix in ('.idx', '.bin'):
        Path(data + suffix).unlink()
    assert not differences(before, launched('--data-path', data))


def test_changed_module_named_by_a_flag_is_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / 'layers_of_mine.py'
    module.write_text('spec = 1')
    found = changed(module, 'spec = 2', '--spec', 'layers_of_mine', 'spec')
    (line,) = found.doubtful
    assert line.startswith('--spec layers_of_mine: was') and not found.decisive


def test_changed_file_of_an_unknown_flag_is_doubtful(tmp_path: Path) -> None:
    """The job itself may write it."""
    path = tmp_path / 'mine'
    path.write_text('one')
    args = Namespace(curriculum=str(path), save=str(path), rank=0)
    before = named_files.other_files(vars(args), flags_known.counts)
    path.write_text('two')
    after = named_files.other_files(vars(args), flags_known.counts)
    assert list(before) == list(after) == [f'--curriculum {path}'] and before != after


def test_file_written_by_the_job_is_no_difference(tmp_path: Path) -> None:
    path = tmp_path / 'trace'
    path.write_text('one')
    assert not changed(path, 'two', '--moe-routing-trace-path', str(path))


def test_path_that_is_not_utf_8_has_an_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It differs from that of a path with other undecodable bytes."""
    monkeypatch.chdir(tmp_path)  # because long paths are shortened
    prefixes = [os.fsdecode(name) for name in (b'm\xfcller', b'm\xf6ller')]
    for prefix in prefixes:
        write_data(Path(prefix), sequences=2)
    one, other = (launched('--data-path', prefix) for prefix in prefixes)
    (line,) = differences(decode(encode(one)), decode(encode(other))).decisive
    assert '\\udcfcller, is' in line
    args = parsed('--data-path', prefixes[0])
    assert identity.run_identity(vars(args), 'run') != identity.run_identity(
        vars(parsed('--data-path', prefixes[1])), 'run'
    )


VARIABLES = {name: words.split() for name, words in DATA['environment'].items()}


@each('name, told', [(n, int(kind == 'decisive')) for kind in VARIABLES for n in VARIABLES[kind]])
def test_environment_holds_variables_that_may_decide_bits(
    name: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = computing.environment()
    monkeypatch.setenv(name, 'value')
    assert computing.environment() == before | ({name: 'value'} if told else {})


def test_environment_includes_nccl_configuration_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / 'nccl.conf'
    settings.write_text('# rings\nNCCL_ALGO=Ring\nNCCL_DEBUG = INFO\n')
    monkeypatch.setattr(computing, '_NCCL_SETTINGS', [settings, tmp_path / 'none'])
    monkeypatch.delenv('NCCL_ALGO', raising=False)
    assert computing.environment()['NCCL_ALGO'] == 'Ring'
    monkeypatch.setenv('NCCL_ALGO', 'Tree')
    monkeypatch.setenv('NCCL_TOPO_FILE', str(settings))
    found = computing.environment()
    assert found['NCCL_ALGO'] == 'Tree' and re.fullmatch(
        rf'{settings} \(\d+ bytes, \w+\)', found['NCCL_TOPO_FILE']
    )
    assert 'NCCL_DEBUG' not in found


def test_versions_include_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / 'train.py'
    program.write_text('one')
    monkeypatch.setattr(sys, 'argv', [str(program)])
    found = computing.versions(on_cpu=True)
    assert {'torch', 'megatron-core', 'megatron-moevement', 'python'} <= found.keys()
    program.write_text('two')
    assert found['program'] != computing.versions(on_cpu=True)['program']


def test_checkout_before_the_installed_release_is_named(tmp_path: Path) -> None:
    """As containers ship one: PYTHONPATH names it."""
    (there,) = megatron.core.__path__
    core = tmp_path / 'megatron' / 'core'
    core.mkdir(parents=True)
    for path in Path(there).iterdir():
        (core / path.name).symlink_to(path)
    information = (core / 'package_info.py').read_text()
    (core / 'package_info.py').unlink()
    (core / 'package_info.py').write_text(f"{information}\n__version__ = '0.20.0'\n")
    program = (
        'from megatron.moevement.job import computing, flags\n'
        'found = computing.versions(on_cpu=True)\n'
        'print(found["megatron-core"], found["folder of megatron-core"], sep=" in ")\n'
        'print(flags.hazard({}))'
    )
    ours = Path(computing.__file__).parents[3]
    path = os.pathsep.join(map(str, (ours, tmp_path)))
    command = [sys.executable, '-W', 'ignore', '-c', program]
    said = subprocess.check_output(command, env=os.environ | {'PYTHONPATH': path}, text=True)
    release, warning = said.splitlines()[-2:]
    assert release == f'0.20.0 in {core}'
    assert f'only megatron-core 0.19.2 was checked, not {release},' in warning


@pytest.mark.parametrize(
    ('package', 'module'), [('apex', 'apex'), ('transformer-engine', 'transformer_engine')]
)
@pytest.mark.parametrize('version', ['2.0', None])
def test_release_of_a_checkout_without_an_installed_one_is_named(
    package: str, module: str, version: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    imported = ModuleType(module)
    imported.__path__ = [str(tmp_path)]
    if version:
        imported.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, imported)
    named = {package: version or 'unknown release', f'folder of {package}': str(tmp_path)}
    assert computing.release_of(package) == named


def test_versions_include_the_thread_count_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Without OMP_NUM_THREADS, the number of cores splits a sum, which changes its bits."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    numbers = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    found = []
    for threads in 1, 2:
        torch.set_num_threads(threads)
        found.append((numbers.sum().item(), computing.versions(on_cpu=True)))
    assert found[0][0] != found[1][0]
    (line,) = differences(*(identity.RunSettings(versions=one) for _, one in found)).doubtful
    assert line == 'threads of torch on the CPU: was 1, is 2'
    assert 'threads of torch on the CPU' not in computing.versions(on_cpu=False)


@pytest.mark.parametrize(
    ('said', 'told'),
    [
        (
            'processor : 0\nvendor_id\t: X\nflags\t\t: fpu amx_bf16 avx2\n\nprocessor',
            'X amx_bf16 avx2',
        ),
        ('processor : 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n\n', '0x41 asimd'),
        (None, None),
    ],
)
def test_versions_include_the_matrix_units_of_the_cpu(
    said: str | None, told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two CPUs with AVX512, one may have AMX, which multiplies bfloat16 in another order."""
    if said is not None:
        (tmp_path / 'cpuinfo').write_text(said)
    monkeypatch.setattr(computing, '_CPU_INFO', tmp_path / 'cpuinfo')
    assert computing.versions(on_cpu=True).get('CPU') == told


@pytest.mark.parametrize('change', ['longer', 'one more', 'other bytes'])
def test_code_changed_in_place_is_detected(change: str, tmp_path: Path) -> None:
    """The version of a checkout stays the same. Files of equal size count as equal."""
    (tmp_path / 'core').mkdir()
    (tmp_path / 'core' / 'layers.py').write_text('a')
    (tmp_path / 'core' / 'layers.pyc').write_text('compiled')
    before = computing.code_of([tmp_path])
    if change == 'one more':
        (tmp_path / 'experts.py').touch()
    else:
        (tmp_path / 'core' / 'layers.py').write_text('ab' if change == 'longer' else 'b')
    assert (computing.code_of([tmp_path]) == before) is (change == 'other bytes')


def test_code_counts_as_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is forked from a template runs the code that the template imported."""
    monkeypatch.setattr(computing, 'code_of', lambda folders: 'edited since')
    found = computing.versions(on_cpu=True)
    codes = {found['code of megatron-core'], found['code of megatron-moevement']}
    assert len(codes) == 2 and 'edited since' not in codes


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, 'gethostname', lambda: 'node7')
    monkeypatch.delenv('MOEVEMENT_NODE', raising=False)


@pytest.mark.usefixtures('node')
def test_missing_file_is_named(tmp_path: Path) -> None:
    settings = {'tokenizer_model': str(tmp_path / 'model'), 'vocab_file': None}
    with pytest.raises(ConfigurationError) as refused:
        refuse_missing(settings, rank=3)
    path = tmp_path / 'model'
    assert f'--tokenizer-model: {path} does not exist for rank 3 on node7' in str(refused.value)
    assert str(refused.value).endswith('correct the path, or mount or copy the file to that node.')
    path.touch()
    refuse_missing(settings, rank=3)


def test_name_in_a_model_hub_is_not_checked() -> None:
    refuse_missing({'tokenizer_model': 'deepseek-ai/DeepSeek-V3'}, rank=0)


@pytest.mark.usefixtures('node')
@pytest.mark.parametrize('flag', ['data_path', 'train_data_path'])
def test_missing_dataset_file_is_named(flag: str, tmp_path: Path) -> None:
    here, there = tmp_path / 'here', tmp_path / 'there'
    for path in ('here.idx', 'here.bin', 'there.idx'):
        (tmp_path / path).touch()
    settings = {flag: ['0.3', str(here), '0.7', str(there)]}
    assert f'{there}.bin does not exist for rank 3 on node7' in str(missing_data(settings, rank=3))
    (tmp_path / 'there.bin').touch()
    assert missing_data(settings, rank=3) is None
    assert missing_data({flag: ['s3://bucket/text']}, rank=0) is None
    assert missing_data({}, rank=0) is None


@pytest.mark.parametrize(
    ('split', 'documents', 'empty'),
    [
        ('969,30,1', 4, True),
        ('969,30,1', 500, True),  # the test part begins at 499.5, which is rounded to 500
        ('969,30,1', 501, False),
        ('100,0,0', 1, False),
        ('1,1,1', 2, True),  # it ends where it begins, at 1
        ('1,1,1', 3, False),
        ('1,1,0', 1, True),
    ],
)
@pytest.mark.parametrize('flag', ['data_path', 'train_data_path'])
def test_split_that_leaves_a_part_empty_is_named(
    split: str, documents: int, empty: bool, flag: str, tmp_path: Path
) -> None:
    prefix = str(tmp_path / 'text')
    builder = IndexedDatasetBuilder(f'{prefix}.bin', dtype=numpy.uint16)
    for _ in range(documents):
        builder.add_document(torch.tensor([1, 2]), [2])
    builder.finalize(f'{prefix}.idx')
    found = empty_part({flag: [prefix], 'split': split, 'sft': False})
    begin = f'--split {split}: a part of it gets none of the {documents} sequences of {prefix}; '
    assert str(found).startswith(begin) is (empty and flag == 'data_path'), found
    assert empty_part({flag: [prefix], 'split': split, 'sft': True}) is None
