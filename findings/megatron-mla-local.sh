#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# megatron-core 0.19.2, torch 2.14.1, no GPU.
# Guess: a layer can be built from the specification that get_gpt_layer_local_spec returns for
# multi_latent_attention=True, an argument with its own branch and documentation.
# Seen: no layer can. Multi-latent attention gives its core attention k_channels and v_channels, which
# only that of Transformer Engine takes; DotProductAttention of the local specification refuses them.
# So --multi-latent-attention with --transformer-impl local ends at the start of every job.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3.12 -m venv "$place"
"$place/bin/pip" install --quiet torch==2.14.1 megatron-core==0.19.2
cat >"$place/build.py" <<'PYTHON'
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.spec_utils import build_module

torch.cuda.current_device = lambda: 'cpu'  # the layer asks for it; no GPU is used
store = torch.distributed.HashStore()
torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = MLATransformerConfig(
    num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True
)
spec = get_gpt_layer_local_spec(multi_latent_attention=True)
print('specification of', spec.submodules.self_attention.module.__name__)
try:
    build_module(spec, config=config)
    print('built')
except TypeError as error:
    print(str(error).partition('got an ')[2].partition(' when instantiating MLA')[0])
PYTHON
"$place/bin/python" -W ignore "$place/build.py" 2>/dev/null | tee "$place/seen"
diff "$place/seen" - <<'EXPECTED'
specification of MLASelfAttention
unexpected keyword argument 'k_channels' when instantiating DotProductAttention
EXPECTED
