# SPDX-License-Identifier: Apache-2.0
"""Megatron's flags that a plan depends on: model, layout, batch and precision.

Only given flags count: a flag replaces the value of a preset; without a preset, missing flags have
Megatron's defaults. Checked against megatron-core 0.19.2.
"""

import argparse
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, NamedTuple, get_type_hints

from msgspec.structs import replace

from moevement_ext.config import flag_of, flagged
from moevement_ext.config_file import CONFIG_FLAG, from_files

from ..lab.fields import Count, Whole, parser_of
from ..lab.programs import Parser
from ..lab.trainer_flags import trainer_parser
from ..model.description import DescriptionError, Training
from ..model.layout import Batch, Layout, Precision, spread
from ..model.shape import LatentAttention, ModelShape, layers_with_experts
from .planning import ProtectionSettings

_NAMES: dict[str, Any] = tomllib.loads(
    files(__package__).joinpath('megatron.toml').read_text('utf-8')
)
_STRUCTS = {
    'layout': Layout,
    'batch': Batch,
    'precision': Precision,
    'model': ModelShape,
    'latent': LatentAttention,
    'protection': ProtectionSettings,
}
_OTHERS = _NAMES.pop('others')
_OF_MODEL = {*_NAMES['model'], *_NAMES['latent'], *_OTHERS['of_model']}
_OF_STAGE, _CHUNKS, *_UNEVEN = _OTHERS['sizes']
_OURS = {'--sparse-ckpt', CONFIG_FLAG, *(flag_of(one.name) for one in flagged())}
_DELAYED = 'delayed'
_NEAR = 0.8  # similarity, from 0 to 1, of a flag that may be a misspelt one


class MegatronFlags(NamedTuple):
    """Given values, by name of the flag with underscores."""

    given: dict[str, Any]
    unused: list[str]
    """Flags that do not affect a plan."""

    def training(self, base: Training | None, ranks: int | None) -> Training:
        """Model and layout, taken from `base` where no flag is given.

        Raises DescriptionError if a required value has neither a flag nor a base.
        """
        if base is None:
            model = _model(self)
        elif described := sorted(_OF_MODEL & self.given.keys()):
            raise DescriptionError(
                f'{flag(described[0])} describes a model, and so does --model; give one of them'
            )
        else:
            model = base.model
        layout = self._layout(base, model, ranks)
        return Training(model, layout, self._batch(base, layout), self._precision(base))

    def fields(self, section: str) -> dict[str, Any]:
        """Given values by field, of a section of the file."""
        names = _NAMES[section]
        return {new: self.given[old] for old, new in names.items() if old in self.given}

    def named(self, field: str) -> str | None:
        """The flag that set a field; None if no flag did."""
        names = [(old, new) for section in _NAMES.values() for old, new in section.items()]
        found = (flag(old) for old, new in names if new == field and old in self.given)
        return next(found, flag(field) if field in self.given else None)

    def _layout(self, base: Training | None, model: ModelShape, ranks: int | None) -> Layout:
        ranks = ranks or (base.layout.ranks if base else None)
        if ranks is None:
            raise DescriptionError('--gpus is missing: give the number of GPUs of the job')
        start = base.layout if base else Layout(1, distributed_optimizer=False)
        changes = {'ranks': ranks, **self.fields('layout')}
        stages = changes.get('pipeline', start.pipeline)
        if stages != start.pipeline:
            changes['layers_per_stage'] = None
        changes.update(self._chunks(model.layers, stages))
        changes.update(self._uneven(model.layers, stages))
        return replace(start, **changes)

    def _chunks(self, layers: int, stages: int) -> dict[str, Any]:
        of_stage, count = (self.given.get(name) for name in (_OF_STAGE, _CHUNKS))
        if of_stage:
            count, left = divmod(layers, stages * of_stage)
            if left:
                raise DescriptionError(
                    f'{flag(_OF_STAGE)} {of_stage}: times {stages} stages it must divide the '
                    f'{layers} layers'
                )
        return {'chunks': count} if count else {}

    def _uneven(self, layers: int, stages: int) -> dict[str, Any]:
        first, last = ([self.given[name]] if name in self.given else [] for name in _UNEVEN)
        ends = [*first, *last]
        if not ends:
            return {}
        if stages < 2 or sum(ends) > layers or (stages == len(ends) and sum(ends) != layers):
            raise DescriptionError(
                f'{" and ".join(map(flag, _UNEVEN))} {ends} do not fit {layers} layers on {stages} '
                'stages'
            )
        middle = spread(layers - sum(ends), stages - len(ends)) if stages > len(ends) else ()
        return {'layers_per_stage': (*first, *middle, *last)}

    def _batch(self, base: Training | None, layout: Layout) -> Batch:
        """Without a base, one micro-batch on each data-parallel rank is Megatron's default."""
        sizes = self.fields('batch')
        if base is None:
            one = sizes.get('micro_batch_size', Batch().micro_batch_size) * layout.data
            sizes.setdefault('global_batch_size', one)
        return replace(base.batch if base else Batch(), **sizes)

    def _precision(self, base: Training | None) -> Precision:
        state = self.fields('precision')
        history = state.pop('amax_history', 1)
        if 'sparse_ckpt_fp8_masters' in self.given:
            state['master'] = 'fp8'
        if 'fp8_format' in self.given:
            delayed = self.given.get('fp8_recipe', _DELAYED) == _DELAYED
            state['amax_history'] = history if delayed else 0
        weights = {'compute': 'fp8'} if 'fp8_param_gather' in self.given else {}
        formats = [name for name in ('bf16', 'fp16') if name in self.given]
        if base and not formats:
            return replace(base.precision, **weights, **state)
        compute = formats[0] if formats else 'fp32'
        boundary = 'fp32' if 'fp32_residual_connection' in self.given else compute
        return Precision(**{'compute': compute, 'boundary': boundary, **weights, **state})


def _model(flags: MegatronFlags) -> ModelShape:
    """The model of a whole set of flags, with Megatron's defaults."""
    given, shape = flags.given, flags.fields('model')
    for name in ('num_layers', 'hidden_size', 'num_attention_heads', 'vocab_size'):
        if name not in given:
            raise DescriptionError(
                f'{flag(name)} is missing: give --model, or a whole model as Megatron flags '
                f'after --'
            )
    hidden, gated = shape['hidden_size'], shape.setdefault('gated', False)
    usual = int(8 * hidden / 3 / 64) * 64 if gated else 4 * hidden
    size = shape.setdefault('ffn_hidden_size', usual)
    shape.setdefault('expert_hidden_size', size)
    groups, top_k = shape.pop('query_groups', 1), shape.pop('top_k', 2)
    if 'group_query_attention' in given:
        shape['query_groups'] = groups
    if 'multi_latent_attention' in given:
        shape['latent'] = LatentAttention(**flags.fields('latent'))
    if given.get('position_embedding_type', 'learned_absolute') != 'learned_absolute':
        shape['learned_positions'] = 0
    return ModelShape(
        name='Megatron flags',
        top_k=top_k if 'experts' in shape else 0,
        moe_layers=layers_with_experts(given.get('moe_layer_freq', '1'), shape['layers']),
        tied_embeddings='untie_embeddings_and_output_weights' not in given,
        norm_bias=given.get('normalization', 'LayerNorm') == 'LayerNorm',
        linear_bias='disable_bias_linear' not in given,
        **shape,
    )


def parse_megatron_flags(argv: Sequence[str]) -> MegatronFlags:
    """Separate flags that a plan depends on from others. Exits with a message on a wrong value."""
    parser = Parser(
        prog='moevement plan ... --',
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    kinds: dict[str, Any] = dict.fromkeys(_OTHERS['switches'], bool)
    kinds |= dict.fromkeys(_OTHERS['texts'], str)
    kinds |= dict.fromkeys((_OF_STAGE, _CHUNKS), Whole) | dict.fromkeys(_UNEVEN, Count)
    for section, names in _NAMES.items():
        hints = get_type_hints(_STRUCTS[section], include_extras=True)
        kinds |= {name: hints[field] for name, field in names.items()}
    for name, kind in kinds.items():
        if kind is bool:
            parser.add_argument(flag(name), action='store_true')
        else:
            parser.add_argument(flag(name), type=parser_of(kind))
    given, unused = parser.parse_known_args(list(argv))
    for name, setting in from_files(argv).items():
        if (key := f'sparse_ckpt_{name}') in _NAMES['protection']:
            vars(given).setdefault(key, setting.value)
    flags = [item for item in unused if item.startswith('--')]
    other = [one for one in flags if one.partition('=')[0] not in _OURS]
    if any(get_close_matches(one, parser._option_string_actions, 1, _NEAR) for one in other):
        # Slow, and only needed to tell another flag from a mistake.
        known = trainer_parser()._option_string_actions
        if unknown := [one for one in flags if one.partition('=')[0] not in known]:
            parser.error(f'unrecognized arguments: {" ".join(unknown)}')
    return MegatronFlags(vars(given), flags)


def flag(name: str) -> str:
    return '--' + name.replace('_', '-')
