# SPDX-License-Identifier: Apache-2.0
"""Megatron's flags that a plan depends on: model, layout, batch and precision.

Only given flags count: a flag replaces the value of a preset; without a preset, missing flags have
Megatron's defaults. Checked against megatron-core 0.19.2.
"""

import argparse
import dataclasses
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain
from typing import Any

from msgspec.structs import replace

from moevement_ext.config import AUTO, flagged, network_rate

from ..lab.arguments import Parser
from ..model.description import DescriptionError, Training
from ..model.layout import Batch, Layout, Precision, spread
from ..model.shape import LatentAttention, ModelShape, layers_with_experts

_NAMES: dict[str, Any] = tomllib.loads(
    files(__package__).joinpath('megatron.toml').read_text('utf-8')
)
_LAYOUT, _BATCH, _PRECISION, _PROTECTION = (
    _NAMES[section] for section in ('layout', 'batch', 'precision', 'protection')
)
_MODEL: dict[str, list[str]] = _NAMES['model']
_CHUNKS = ('num_layers_per_virtual_pipeline_stage', 'num_virtual_stages_per_pipeline_rank')
_UNEVEN = ('decoder_first_pipeline_num_layers', 'decoder_last_pipeline_num_layers')
_FP8_MASTERS = 'sparse_ckpt_fp8_masters'
_DELAYED = 'delayed'
RECOVERIES = ('localized', 'global', 'whole-job')


@dataclasses.dataclass(frozen=True)
class MegatronFlags:
    """Given values, by name of the flag with underscores."""

    given: dict[str, Any]
    unused: list[str]
    """Flags that do not affect a plan."""

    def training(self, base: Training | None, ranks: int | None) -> Training:
        """Model and layout, taken from `base` where no flag is given.

        Raises DescriptionError if a required value has neither a flag nor a base.
        """
        model = self._model(base)
        layout = self._layout(base, model, ranks)
        return Training(model, layout, self._batch(base, layout), self._precision(base))

    def protection(self) -> dict[str, Any]:
        return self._renamed(_PROTECTION)

    def named(self, field: str) -> str | None:
        """The flag that set a field; None if no flag did."""
        names = {**_LAYOUT, **_BATCH, **_PRECISION, **_PROTECTION}
        found = (_flag(old) for old, new in names.items() if new == field and old in self.given)
        return next(found, _flag(field) if field in self.given else None)

    def _renamed(self, names: dict[str, str]) -> dict[str, Any]:
        return {new: self.given[old] for old, new in names.items() if old in self.given}

    def _model(self, base: Training | None) -> ModelShape:
        names = {*chain.from_iterable(_MODEL.values())} & set(self.given)
        if base is None:
            return _model_of_flags(self.given)
        if names:
            raise DescriptionError(
                f'{_flag(min(names))} describes a model, and so does --model; give one of them'
            )
        return base.model

    def _layout(self, base: Training | None, model: ModelShape, ranks: int | None) -> Layout:
        ranks = ranks or (base.layout.ranks if base else None)
        if ranks is None:
            raise DescriptionError('--gpus is missing: give the number of GPUs of the job')
        start = base.layout if base else Layout(1, distributed_optimizer=False)
        changes = {'ranks': ranks, **self._renamed(_LAYOUT)}
        stages = changes.get('pipeline', start.pipeline)
        if stages != start.pipeline:
            changes['layers_per_stage'] = None
        changes.update(self._chunks(model.layers, stages))
        changes.update(self._uneven(model.layers, stages))
        return replace(start, **changes)

    def _chunks(self, layers: int, stages: int) -> dict[str, Any]:
        of_stage, count = (self.given.get(name) for name in _CHUNKS)
        for name, value in zip(_CHUNKS, (of_stage, count), strict=True):
            if value is not None and value < 1:
                raise DescriptionError(f'{_flag(name)} {value}: give a whole number, 1 or more')
        if of_stage:
            count, left = divmod(layers, stages * of_stage)
            if left:
                raise DescriptionError(
                    f'{_flag(_CHUNKS[0])} {of_stage}: times {stages} stages it must divide the '
                    f'{layers} layers'
                )
        return {'chunks': count} if count else {}

    def _uneven(self, layers: int, stages: int) -> dict[str, Any]:
        first, last = (self.given.get(name) for name in _UNEVEN)
        if first is None and last is None:
            return {}
        ends = [count for count in (first, last) if count is not None]
        if stages < 2 or sum(ends) > layers or (stages == len(ends) and sum(ends) != layers):
            raise DescriptionError(
                f'{_flag(_UNEVEN[0])} and {_flag(_UNEVEN[1])} {ends} do not fit {layers} layers '
                f'on {stages} stages'
            )
        middle = spread(layers - sum(ends), stages - len(ends)) if stages > len(ends) else ()
        before = () if first is None else (first,)
        return {'layers_per_stage': (*before, *middle, *(() if last is None else (last,)))}

    def _batch(self, base: Training | None, layout: Layout) -> Batch:
        """Without a base, one micro-batch on each data-parallel rank is Megatron's default."""
        sizes = self._renamed(_BATCH)
        if base is None:
            one = sizes.get('micro_batch_size', Batch().micro_batch_size) * layout.data
            sizes.setdefault('global_batch_size', one)
        return replace(base.batch if base else Batch(), **sizes)

    def _precision(self, base: Training | None) -> Precision:
        state = self._renamed(_PRECISION)
        if _FP8_MASTERS in self.given:
            state['master'] = 'fp8'
        weights: dict[str, Any] = {'compute': 'fp8'} if 'fp8_param_gather' in self.given else {}
        if 'fp8_format' in self.given:
            delayed = self.given.get('fp8_recipe', _DELAYED) == _DELAYED
            weights['amax_history'] = self.given.get('fp8_amax_history_len', 1) if delayed else 0
        formats = [name for name in ('bf16', 'fp16') if name in self.given]
        if base and not formats:
            return replace(base.precision, **state, **weights)
        compute = formats[0] if formats else 'fp32'
        boundary = 'fp32' if 'fp32_residual_connection' in self.given else compute
        return Precision(**{'compute': compute} | weights, boundary=boundary, **state)


def parse_megatron_flags(argv: Sequence[str]) -> MegatronFlags:
    """Separate flags that a plan depends on from others. Exits with a message on a wrong value."""
    parser = Parser(
        prog='moevement plan ... --',
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    switches = {name for name in _LAYOUT if not name.endswith(('_size', '_instances'))}
    sizes = *(set(_LAYOUT) - switches), *_BATCH, *_CHUNKS, *_UNEVEN, *_NAMES['others']['sizes']
    for name in (*_MODEL['sizes'], *sizes):
        parser.add_argument(_flag(name), type=int)
    for name in (*_MODEL['switches'], *switches, *_NAMES['others']['switches'], _FP8_MASTERS):
        parser.add_argument(_flag(name), action='store_true')
    for name in (*_MODEL['texts'], *_PRECISION, *_NAMES['others']['texts']):
        parser.add_argument(_flag(name))
    parser.add_argument('--sparse-ckpt-network-gb-per-s', type=network_rate)
    parser.add_argument('--sparse-ckpt-log-lag', type=float)
    parser.add_argument('--sparse-ckpt-recovery', choices=(AUTO, *RECOVERIES))
    given, unused = parser.parse_known_args(list(argv))
    _refuse_unknown(unused, parser.prog)
    return MegatronFlags(vars(given), [item for item in unused if item.startswith('--')])


def _refuse_unknown(unused: Sequence[str], prog: str) -> None:
    """Exit with a message on a flag of sparse checkpointing that the training refuses as well."""
    parser = Parser(prog=prog, allow_abbrev=False, add_help=False)
    for setting in flagged():
        parser.add_argument(_flag(f'sparse_ckpt_{setting.name}'), nargs='?')
    parser.add_argument('--sparse-ckpt', action='store_true')
    parser.add_argument('--sparse-ckpt-digest')
    left = parser.parse_known_args(list(unused))[1]
    if unknown := [item for item in left if item.startswith('--sparse-ckpt')]:
        parser.error(f'unrecognized arguments: {" ".join(unknown)}')


def _model_of_flags(given: dict[str, Any]) -> ModelShape:
    for name in ('num_layers', 'hidden_size', 'num_attention_heads', 'vocab_size'):
        if name not in given:
            raise DescriptionError(
                f'{_flag(name)} is missing: give --model, or a whole model as Megatron flags '
                f'after --'
            )
    hidden, layers = given['hidden_size'], given['num_layers']
    gated = 'swiglu' in given
    default_size = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    size = given.get('ffn_hidden_size', default_size)
    learned = given.get('position_embedding_type', 'learned_absolute') == 'learned_absolute'
    grouped = 'group_query_attention' in given
    return ModelShape(
        name='Megatron flags',
        layers=layers,
        hidden_size=hidden,
        attention_heads=given['num_attention_heads'],
        vocab_size=given['vocab_size'],
        ffn_hidden_size=size,
        query_groups=given.get('num_query_groups', 1) if grouped else None,
        head_size=given.get('kv_channels'),
        latent=_latent(given) if 'multi_latent_attention' in given else None,
        experts=given.get('num_experts', 0),
        top_k=given.get('moe_router_topk', 2) if 'num_experts' in given else 0,
        expert_hidden_size=given.get('moe_ffn_hidden_size', size),
        shared_hidden_size=given.get('moe_shared_expert_intermediate_size', 0),
        moe_layers=layers_with_experts(given.get('moe_layer_freq', '1'), layers),
        gated=gated,
        tied_embeddings='untie_embeddings_and_output_weights' not in given,
        learned_positions=given.get('max_position_embeddings', 0) if learned else 0,
        norm_bias=given.get('normalization', 'LayerNorm') == 'LayerNorm',
        linear_bias='disable_bias_linear' not in given,
        qkv_bias='add_qkv_bias' in given,
        qk_norm='qk_layernorm' in given,
    )


def _latent(given: dict[str, Any]) -> LatentAttention:
    return LatentAttention(
        kv_rank=given.get('kv_lora_rank', 32),
        query_key_size=given.get('qk_head_dim', 128),
        position_size=given.get('qk_pos_emb_head_dim', 64),
        value_size=given.get('v_head_dim', 128),
        query_rank=given.get('q_lora_rank', 0),
    )


def _flag(name: str) -> str:
    return '--' + name.replace('_', '-')
