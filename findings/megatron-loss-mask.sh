#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# megatron-core 0.19.2, torch 2.14.1, no GPU.
# Guess: the loss mask of a sample of GPTDataset, which blanks padding, follows from its own tokens.
# Seen: the data set keeps the mask of the sample that a process reads first, with the blanks of its
# padding, and those places are blank in all later samples, too. So words are not trained, and which
# ones depends on the first sample: on where a job restarts, and on the number of loader processes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3.12 -m venv "$place"
"$place/bin/pip" install --quiet torch==2.14.1 megatron-core==0.19.2
cat >"$place/masks.py" <<'PYTHON'
import sys
from types import SimpleNamespace

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import Split

PAD, END, WORD, LENGTH, TEXTS = 0, 1, 7, 8, 4
file = sys.argv[1]
builder = IndexedDatasetBuilder(f'{file}.bin', dtype=np.int32)
for text in range(TEXTS):  # each has another number of words, and is padded to one length
    words = [WORD] * (2 * text + 1)
    builder.add_item(torch.tensor((words + [PAD] * LENGTH)[:LENGTH]))
    builder.end_document()
builder.finalize(f'{file}.idx')
config = GPTDatasetConfig(
    random_seed=1, sequence_length=LENGTH, blend=([file], None), split='1,0,0',
    path_to_cache=sys.argv[2], reset_position_ids=False, reset_attention_mask=False,
    eod_mask_loss=False,
    tokenizer=SimpleNamespace(vocab_size=8, eod=END, pad=PAD, unique_identifiers={}),
)


def masks(*samples):
    text = GPTDataset.build_low_level_dataset(file, config)
    data = GPTDataset(text, file, np.arange(TEXTS), None, Split.train, config)
    found = {one: ''.join(map(str, data[one]['loss_mask'].int().tolist())) for one in samples}
    return [found[one] for one in sorted(samples)]


print('each alone: ', *masks(0), *masks(1), *masks(2))
print('0 is first: ', *masks(0, 1, 2))
print('1 is first: ', *masks(1, 0, 2))
PYTHON
"$place/bin/python" -W ignore "$place/masks.py" "$place/text" "$place/cache" 2>/dev/null | tee "$place/seen"
diff "$place/seen" - <<'EXPECTED'
each alone:  11111101 00000001 11110001
0 is first:  11111101 00000001 11110001
1 is first:  00000001 00000001 00000001
EXPECTED
