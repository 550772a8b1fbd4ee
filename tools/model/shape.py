# SPDX-License-Identifier: Apache-2.0
"""Shape of a Mixture-of-Experts GPT, to count parameters and FLOPs per operator.

Names of dimensions follow Megatron's flags. Weights, norms and biases are counted; tensors below a
millionth of a model (router buffers, step counters) are left out.
"""

import re
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from ..lab.fields import Count, FieldError, Whole, require

# Limits of any dimension; sums of bytes stay within 64 bits.
_UP_TO = 'give a whole number from {} to {}'
Dimension = Annotated[int, Meta(ge=1, le=2**24, description=_UP_TO.format(1, 2**24))]
Size = Annotated[int, Meta(ge=0, le=2**24, description=_UP_TO.format(0, 2**24))]
Layers = Annotated[int, Meta(ge=1, le=10_000, description=_UP_TO.format(1, 10_000))]
Parts = Annotated[int, Meta(ge=0, le=10_000, description=_UP_TO.format(0, 10_000))]
_MOST_PARAMETERS = 2**50
_LAYER_LIST = re.compile(r'\[([01, ]+)\](?:\*(\d+))?')


def layers_with_experts(text: str, layers: int) -> tuple[int, ...]:
    """Parse --moe-layer-freq: every n-th layer, or a sum of lists as in `([0]*3+[1]*58)`.

    Raises FieldError for anything else.
    """
    if text.isdecimal() and int(text) > 0:
        return tuple(int(layer % int(text) == 0) for layer in range(layers))
    pattern: list[int] = []
    for term in text.strip().removeprefix('(').removesuffix(')').split('+'):
        match = _LAYER_LIST.fullmatch(term.strip())
        if match is None:
            rule = 'give a number of at least 1, or a sum of lists of 0 and 1 as in ([0]*3+[1]*58)'
            raise FieldError('moe_layer_freq', rule, text)
        pattern += [int(item) for item in match[1].replace(',', ' ').split()] * int(match[2] or 1)
    return tuple(pattern)


class LatentAttention(Struct, frozen=True, forbid_unknown_fields=True):
    """Multi-head latent attention (DeepSeek-V2): keys and values from a low-rank latent.

    The defaults are Megatron's.
    """

    kv_rank: Whole = 32
    query_key_size: Whole = 128
    """Elements per head of the part of query and key without position."""
    position_size: Whole = 64
    value_size: Whole = 128
    query_rank: Count = 0
    """Size of the latent for queries; 0: queries come directly from the hidden state."""


@dataclass(frozen=True)
class Weights:
    """Elements of a group of tensors, split by tensor parallelism (`split`) or not (`whole`)."""

    split: int = 0
    whole: int = 0
    matrices: int = 0
    vectors: int = 0

    def __add__(self, other: 'Weights') -> 'Weights':
        split, whole = self.split + other.split, self.whole + other.whole
        return Weights(split, whole, self.matrices + other.matrices, self.vectors + other.vectors)

    @property
    def tensors(self) -> int:
        return self.matrices + self.vectors

    @property
    def total(self) -> int:
        return self.split + self.whole

    def per_rank(self, tensor: int) -> int:
        """Number of elements on each of `tensor` tensor-parallel ranks, rounded up."""
        return -(-self.split // tensor) + self.whole


class ModelShape(Struct, frozen=True, forbid_unknown_fields=True):
    """A decoder-only transformer with experts in some or all layers."""

    name: str
    layers: Layers
    hidden_size: Dimension
    attention_heads: Dimension
    vocab_size: Dimension
    ffn_hidden_size: Size = 0
    """Width of the layers without experts; 0 if all layers have experts."""
    query_groups: Whole | None = None
    head_size: Whole | None = None
    """None: hidden_size / attention_heads."""
    latent: LatentAttention | None = None
    experts: Parts = 0
    """Number of experts per layer; 0: a dense model."""
    top_k: Size = 0
    expert_hidden_size: Size = 0
    shared_hidden_size: Size = 0
    """Total width of all shared experts; they belong to the rest of the layer."""
    moe_layers: tuple[int, ...] | None = None
    gated: bool = True
    tied_embeddings: bool = False
    """The head uses the weights of the embedding."""
    learned_positions: Size = 0
    norm_bias: bool = False
    """LayerNorm instead of RMSNorm."""
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        pattern = self.moe_layers
        good = pattern is None or (len(pattern) == self.layers and set(pattern) <= {0, 1})
        rule = f'give a 0 or a 1 for each of the {self.layers} layers'
        require(good, 'moe_layers', pattern, rule)
        kinds = {self.has_experts(number) for number in range(1, self.layers + 1)}
        good, rule = True not in kinds or self.expert_hidden_size > 0, 'give a number above 0'
        require(good, 'expert_hidden_size', self.expert_hidden_size, rule)
        good = True not in kinds or 1 <= self.top_k <= self.experts
        rule = f'give 1 to {self.experts}, the number of experts'
        require(good, 'top_k', self.top_k, rule)
        good = False not in kinds or self.ffn_hidden_size > 0
        rule = 'a layer without experts needs its size, 1 or more'
        require(good, 'ffn_hidden_size', self.ffn_hidden_size, rule)
        good = self.head_size is not None or self.hidden_size % self.attention_heads == 0
        rule = 'give head_size, or an attention_heads that divides hidden_size'
        require(good, 'attention_heads', self.attention_heads, rule)
        good = self.total_parameters <= _MOST_PARAMETERS
        rule = f'gives a model of {self.total_parameters:.0e} parameters, which none has'
        require(good, 'hidden_size', self.hidden_size, rule)

    def has_experts(self, layer: int) -> bool:
        """True if layer number `layer` (from 1) has experts."""
        return self.experts > 0 and (self.moe_layers is None or self.moe_layers[layer - 1] == 1)

    @property
    def total_parameters(self) -> int:
        return self._parameters(self.experts)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses, embedding and head included."""
        return self._parameters(self.top_k)

    def flops_per_token(self, sequence_length: int) -> float:
        """FLOPs of forward and backward: 6 per active weight, and causal attention."""
        heads = self.attention_heads * (self._key_size + self._value_size)
        attention = 3 * self.layers * sequence_length * heads
        looked_up = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        looked_up += self.learned_positions * self.hidden_size
        return 6.0 * (self.active_parameters - looked_up) + attention

    def words(self, vocab_size: int | None = None) -> Weights:
        """Word embedding of `vocab_size` rows (None: unpadded), or the output matrix."""
        words = self.vocab_size if vocab_size is None else vocab_size
        # The embedding is a lookup without a product; the output matrix stays in 16 bits.
        return Weights(split=words * self.hidden_size, vectors=1)

    @property
    def positions(self) -> Weights:
        size = self.learned_positions * self.hidden_size
        return Weights(whole=size, vectors=1) if size else Weights()

    def expert(self) -> Weights:
        return self._feed_forward(self.expert_hidden_size)

    def router(self) -> Weights:
        """The gate of one layer."""
        return Weights(whole=self.hidden_size * self.experts, vectors=1)  # always in 16 bits

    def rest(self, layer: int) -> Weights:
        """Layer number `layer` (from 1) without router and routed experts."""
        shared = self.shared_hidden_size if self.has_experts(layer) else self.ffn_hidden_size
        feed_forward = self._feed_forward(shared) if shared else Weights()
        return self.norm + self._attention() + self.norm + feed_forward

    @property
    def norm(self) -> Weights:
        parts = 2 if self.norm_bias else 1
        return Weights(whole=self.hidden_size * parts, vectors=parts)

    def _parameters(self, experts: int) -> int:
        total = self.words().total * (1 if self.tied_embeddings else 2)
        total += self.positions.total + self.norm.total
        for layer in range(1, self.layers + 1):
            total += self.rest(layer).total
            if self.has_experts(layer):
                total += self.router().total + experts * self.expert().total
        return total

    def _feed_forward(self, size: int) -> Weights:
        matrices = 3 if self.gated else 2
        bias = Weights((matrices - 1) * size, self.hidden_size, vectors=2)
        product = Weights(split=matrices * self.hidden_size * size, matrices=2)
        return product + bias if self.linear_bias else product

    @property
    def _key_size(self) -> int:
        if self.latent:
            return self.latent.query_key_size + self.latent.position_size
        return self.head_size or self.hidden_size // self.attention_heads

    @property
    def _value_size(self) -> int:
        return self.latent.value_size if self.latent else self._key_size

    def _attention(self) -> Weights:
        return self._latent_attention(self.latent) if self.latent else self._grouped_attention()

    def _grouped_attention(self) -> Weights:
        queries = self.attention_heads * self._key_size
        all_heads = queries + 2 * (self.query_groups or self.attention_heads) * self._key_size
        bias = all_heads if self.linear_bias or self.qkv_bias else 0
        whole = self.hidden_size if self.linear_bias else 0
        whole += 2 * self._key_size if self.qk_norm else 0
        vectors = int(bool(bias)) + int(self.linear_bias) + 2 * int(self.qk_norm)
        return Weights(self.hidden_size * (all_heads + queries) + bias, whole, 2, vectors)

    def _latent_attention(self, latent: LatentAttention) -> Weights:
        """Latent attention; each tensor-parallel rank has whole down-projections and norms."""
        down = self.hidden_size * (latent.kv_rank + latent.position_size) + latent.kv_rank
        up = latent.kv_rank * (latent.query_key_size + latent.value_size)
        output = latent.value_size * self.hidden_size
        queries = self.hidden_size * self._key_size
        low = 2 if latent.query_rank else 1
        if latent.query_rank:
            down += self.hidden_size * latent.query_rank + latent.query_rank
            queries = latent.query_rank * self._key_size
        split = self.attention_heads * (up + output + queries)
        return Weights(split, down, matrices=3 + low, vectors=low)
