# SPDX-License-Identifier: Apache-2.0
"""Known models, each with a layout it has been, or plausibly is, trained with.

Shapes are those of the published configurations. The paper's evaluation names parameters, layers
and experts only; where its models are published ones, those are taken, and where the paper differs,
a comment says how. `published` totals are what the sources state, in 1e9 parameters.
"""

from dataclasses import dataclass

from tools.plan.layout import Batch, Layout
from tools.plan.model import LatentAttention, ModelShape


@dataclass(frozen=True)
class Preset:
    """A model and how it is trained."""

    model: ModelShape
    layout: Layout
    batch: Batch
    published_total: float
    """1e9 parameters."""
    published_active: float | None
    """1e9 parameters per token; None: what is stated does not follow from the shape."""


def _every_second(layers: int) -> tuple[int, ...]:
    return tuple(1 - layer % 2 for layer in range(layers))


# StableLM-1.6B with 4 experts in every second of its 24 layers, which has the 2.9e9 parameters that
# the paper states; its 32 layers do not lead there, and its EP 8 has no use for 4 experts.
_MOE_LLAVA = ModelShape(
    'MoE-LLaVa',
    layers=24,
    hidden_size=2048,
    attention_heads=32,
    vocab_size=100352,
    ffn_hidden_size=5632,
    experts=4,
    top_k=2,
    expert_hidden_size=5632,
    moe_layers=_every_second(24),
    norm_bias=True,
)

# Nothing but totals is published; 1536 is the hidden size that gives them.
_GPT_MOE = ModelShape(
    'GPT-MoE',
    layers=12,
    hidden_size=1536,
    attention_heads=16,
    vocab_size=50257,
    experts=32,
    top_k=6,
    expert_hidden_size=6144,
    gated=False,
    tied_embeddings=True,
    learned_positions=2048,
    norm_bias=True,
    linear_bias=True,
)

# Qwen1.5-MoE-A2.7B has 60 experts, 4 of them used, and a shared one of the size of four; the paper
# counts 64 experts, 8 of them used, and none shared.
_QWEN_MOE = ModelShape(
    'QWen-MoE',
    layers=24,
    hidden_size=2048,
    attention_heads=16,
    vocab_size=151936,
    experts=64,
    top_k=8,
    expert_hidden_size=1408,
    qkv_bias=True,
)

# DeepSeekMoE 16B. The paper says 8 experts used besides the 2 shared (published: 6) and 3.7e9
# active parameters, which neither gives.
_DEEPSEEK_MOE = ModelShape(
    'DeepSeek-MoE',
    layers=28,
    hidden_size=2048,
    attention_heads=16,
    vocab_size=102400,
    ffn_hidden_size=10944,
    experts=64,
    top_k=8,
    expert_hidden_size=1408,
    shared_hidden_size=2 * 1408,
    moe_layers=(0, *[1] * 27),
)

# Without the module for multi-token prediction (14e9 more).
_DEEPSEEK_V3 = ModelShape(
    'DeepSeek-V3',
    layers=61,
    hidden_size=7168,
    attention_heads=128,
    vocab_size=129280,
    ffn_hidden_size=18432,
    experts=256,
    top_k=8,
    expert_hidden_size=2048,
    shared_hidden_size=2048,
    moe_layers=(*[0] * 3, *[1] * 58),
    latent=LatentAttention(
        kv_rank=512, query_key_size=128, position_size=64, value_size=128, query_rank=1536
    ),
)

_QWEN3 = ModelShape(
    'Qwen3-235B-A22B',
    layers=94,
    hidden_size=4096,
    attention_heads=64,
    query_groups=4,
    head_size=128,
    vocab_size=151936,
    experts=128,
    top_k=8,
    expert_hidden_size=1536,
    qk_norm=True,
)

_MIXTRAL = ModelShape(
    'Mixtral 8x7B',
    layers=32,
    hidden_size=4096,
    attention_heads=32,
    query_groups=8,
    vocab_size=32000,
    experts=8,
    top_k=2,
    expert_hidden_size=14336,
)

_PAPER_BATCH = Batch(sequence_length=2048, micro_batch_size=2, global_batch_size=512)

PRESETS = {
    # The paper's PP x DP x EP is the number of GPUs; Megatron's data parallelism contains EP.
    'moe-llava': Preset(_MOE_LLAVA, Layout(96, pipeline=6, expert=4), _PAPER_BATCH, 2.9, 2.0),
    'gpt-moe': Preset(_GPT_MOE, Layout(96, pipeline=3, expert=8), _PAPER_BATCH, 7.3, 1.6),
    'qwen-moe': Preset(_QWEN_MOE, Layout(96, pipeline=6, expert=8), _PAPER_BATCH, 14.3, 2.7),
    'deepseek-moe': Preset(
        _DEEPSEEK_MOE, Layout(96, pipeline=12, expert=8), _PAPER_BATCH, 16.4, None
    ),
    'deepseek-v3': Preset(
        _DEEPSEEK_V3,
        Layout(2048, pipeline=16, expert=64, overlap_grad_reduce=True),
        Batch(4096, 1, 15360),
        671,
        37,
    ),
    'qwen3-235b-a22b': Preset(
        _QWEN3,
        Layout(512, pipeline=8, expert=16, tensor=2, expert_tensor=1, sequence_parallel=True),
        Batch(4096, 1, 1024),
        235,
        22,
    ),
    'mixtral-8x7b': Preset(_MIXTRAL, Layout(64, pipeline=4, expert=8), Batch(), 46.7, 12.9),
}
"""By name; the first four are those of the paper's evaluation."""
