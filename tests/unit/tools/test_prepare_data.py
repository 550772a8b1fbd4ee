# SPDX-License-Identifier: Apache-2.0
"""Text to indexed datasets and back, with upstream's own reader as the judge."""

import json
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from tools import prepare_data
from tools.prepare_data import END_OF_DOCUMENT, main

EVERY_BYTE = bytes(range(1, 256)) * 3  # that a text may have


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [sequence.tolist() for sequence in dataset]


def texts(prefix: Path) -> list[bytes]:
    return [bytes(ids) for ids in documents(prefix)]


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A prefix in a folder that the tool has to create."""
    return tmp_path / 'out' / 'data'


def test_bytes_are_read_back_exactly(tmp_path: Path, out: Path) -> None:
    source = tmp_path / 'any.dat'
    source.write_bytes(EVERY_BYTE)
    assert main(['--input', str(source), '--output-prefix', str(out)]) == 0
    assert texts(out) == [EVERY_BYTE]
    assert files_in(out.parent) == {'data.bin', 'data.idx'}


def test_eod_ends_every_document_once(tmp_path: Path, out: Path) -> None:
    long = b'line of text\n' * 200_000
    (tmp_path / 'a.txt').write_bytes(long)
    (tmp_path / 'b.txt').write_bytes(b'short')
    inputs = [str(tmp_path / 'a.txt'), str(tmp_path / 'b.txt')]
    assert main(['--input', *inputs, '--output-prefix', str(out), '--append-eod']) == 0
    assert documents(out) == [[*long, END_OF_DOCUMENT], [*b'short', END_OF_DOCUMENT]]


def test_folder_is_read_in_order_without_other_files(tmp_path: Path, out: Path) -> None:
    contents = {
        'b/2.md': b'four',
        'a.txt': b'one',
        'b/1.py': b'three',
        'a.txt.jsonl': b'{"text": "two"}\n',
        'b/.git/x.txt': b'hidden',
        'c.png': b'picture',
        'd.txt': b'',
    }
    for name, content in contents.items():
        path = tmp_path / 'in' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert main(['--input', str(tmp_path / 'in'), '--output-prefix', str(out)]) == 0
    assert texts(out) == [b'one', b'two', b'three', b'four']


def test_json_lines_give_a_document_each(tmp_path: Path, out: Path) -> None:
    source = tmp_path / 'x.jsonl'
    records = [{'id': 1, 'body': 'erste Zeile ü'}, {'body': ''}, {'body': 'two\nlines'}]
    source.write_text('\n\n'.join(json.dumps(record) for record in records))
    command = ['--input', str(source), '--output-prefix', str(out), '--json-key', 'body']
    assert main(command) == 0
    assert texts(out) == ['erste Zeile ü'.encode(), b'two\nlines']


def test_standard_library_is_the_default_and_repeats_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in 'first', 'again':
        assert main(['--output-prefix', str(tmp_path / run), '--limit-mb', '2']) == 0
    for suffix in '.bin', '.idx':
        first, again = ((tmp_path / run).with_suffix(suffix) for run in ('first', 'again'))
        assert first.read_bytes() == again.read_bytes()
    first_document = texts(tmp_path / 'first')[0]
    assert first_document == prepare_data.find_files(['stdlib'])[0].read_bytes()
    flags = f'--data-path {tmp_path}/again --tokenizer-type NullTokenizer --vocab-size 257'
    assert capsys.readouterr().out.endswith(f'flags for the trainer: {flags}\n')


def test_upstream_trains_on_it_with_the_printed_flags(tmp_path: Path, out: Path) -> None:
    """The samples of GPTDataset are the text, and its end of document is ours."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers import MegatronTokenizer

    (tmp_path / 'a.txt').write_bytes(b'abcdefgh' * 8)
    command = ['--input', str(tmp_path / 'a.txt'), '--output-prefix', str(out), '--append-eod']
    assert main(command) == 0
    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={'library': 'null-text'}, vocab_size=257
    )
    assert tokenizer.eod == END_OF_DOCUMENT
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=16, blend=([str(out)], None), split='1,0,0',
        tokenizer=tokenizer, reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False,
    )  # fmt: skip
    indexed = IndexedDataset(str(out))
    dataset = GPTDataset(indexed, str(out), np.arange(1, dtype=np.int32), 4, Split.train, config)
    samples = sorted(bytes(dataset[i]['tokens'].tolist()) for i in range(4))
    assert samples == [b'abcdefgh' * 2] * 4


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('missing.txt', None, '--input {path}: no such file or folder'),
        ('empty.txt', b'', 'the inputs hold no text'),
        ('bad.jsonl', b'{"text": "good"}\n{"text": \n', '{path}:2: not a JSON object'),
        ('key.jsonl', b'{"body": "x", "id": 3}\n', "{path}:1: no text under 'text' (found: body"),
        ('list.jsonl', b'[1, 2]\n', "{path}:1: no text under 'text' (found: list)"),
    ],
)
def test_unusable_input_is_named_and_leaves_the_older_dataset(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str],
    name: str, content: bytes | None, message: str,
) -> None:  # fmt: skip
    (tmp_path / 'good.txt').write_bytes(b'good')
    assert main(['--input', str(tmp_path / 'good.txt'), '--output-prefix', str(out)]) == 0
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(['--input', str(path), '--output-prefix', str(out)]) == 2
    assert message.format(path=path) in capsys.readouterr().err
    assert texts(out) == [b'good'] and files_in(out.parent) == {'data.bin', 'data.idx'}
