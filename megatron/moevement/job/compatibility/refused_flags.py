# SPDX-License-Identifier: Apache-2.0
"""Flags that `--sparse-ckpt` refuses at start."""

from megatron.moevement.facts import Settings
from megatron.moevement.job.compatibility.precision import (
    DELAYED_IN_PARTS,
    GRADIENTS_IN_FP16,
    MASTERS_AGAINST_RECIPE,
    SCALED,
    SCALES_LOST,
    UNTRIED_WEIGHTS,
    WITHOUT_ADAM,
    WITHOUT_ENGINE,
)
from megatron.moevement.job.compatibility.rule import (
    ANY,
    GIVEN,
    Condition,
    Rule,
    Values,
    above,
    equal_to,
    number,
)
from moevement_ext.config import RESTART


def _saves_where_it_loads(settings: Settings) -> bool:
    load = settings.get('load')
    return load is not None and load == settings.get('save')


_SAVE_IS_LOAD = Condition('with the same --save and --load', _saves_where_it_loads)
_NOT_SAVED = Condition('without --save', lambda settings: not settings.get('save'))
_DEFAULT_BATCH = Condition(
    'without --global-batch-size',
    lambda settings: (
        not settings.get(
            '_is_global_batch_size_explicitly_specified', settings.get('global_batch_size')
        )
    ),
)
_FIRST = 'write a first checkpoint without --sparse-ckpt, and --load that'
_ONCE = f'leave it out; if the first start needs it, {_FIRST}'
_DELAYED = Condition(
    'with --delay-wgrad-compute', lambda settings: bool(settings.get('delay_wgrad_compute'))
)
_RECORDS = Condition(
    'with --cuda-graph-impl transformer_engine',
    lambda settings: settings.get('cuda_graph_impl') == 'transformer_engine',
)
_NEITHER_ADAM_NOR_MUON = Values(
    'other than adam, and than muon with --muon-scalar-optimizer adam and without '
    '--use-distributed-optimizer', lambda value: value != 'adam',
)  # fmt: skip


def _is_not_replicated_muon(settings: Settings) -> bool:
    # Upstream's validation turns the first flag into the second setting.
    sharded = ('use_distributed_optimizer', 'use_layer_wise_distributed_optimizer')
    return (
        settings.get('optimizer') != 'muon'
        or any(settings.get(name) for name in sharded)
        or settings.get('muon_scalar_optimizer') != 'adam'
    )


_NOT_REPLICATED_MUON = Condition('', _is_not_replicated_muon)


def _balances_quantiles(kinds: object) -> bool:
    return 'quantile_balancing' in (kinds if isinstance(kinds, list) else [kinds])


def _runs_again(settings: Settings) -> bool:
    validated = settings.get('rerun_mode') == 'validate_results'
    checks = ('check_for_large_grads', 'check_for_spiky_loss')
    return validated and any(settings.get(name) for name in checks)


_RERUNS = Condition(
    'with --check-for-large-grads or --check-for-spiky-loss, without --rerun-mode disabled',
    _runs_again,
)
_NO_RERUN = 'add --rerun-mode disabled'
_MOVED_TWICE = (
    'an iteration with a spike runs twice, and then updates router biases twice, but not in a '
    'process that has just started'
)
_FORGETS = 'a restart from a newer dense checkpoint would continue with another state'


def _more_than(shards: str, ranks: str) -> Condition:
    """True if a weight has more shards than ranks that compute with a part of it."""

    def holds(settings: Settings) -> bool:
        return number(settings, shards, 1) > number(settings, ranks, 1)

    return Condition('above the tensor-parallel size', holds)


_NOT_SKIPPED = 'a replay does not skip these iterations'
_NO_GPT = 'other layers and models are not supported'
_NO_DATA = 'pretrain_gpt.py has no data for it'
_DUMPED = 'a replay writes the files of its iterations again, from weights that are partly stale'
_SHARDED = 'the state that it shards is not captured'
_SCALING = 'its scaling state is not captured'

_UNSCALED = 'use fp32 or bf16, or leave --save and --load out'
_LOSES_SCALES = 'upstream saves these moments without their scales if it holds the masters'

REFUSED = (
    # Optimizer and precision
    Rule('--optimizer', _NEITHER_ADAM_NOR_MUON,
         'use --optimizer adam, or muon without --use-distributed-optimizer',
         'the state of other optimizers is not captured', _NOT_REPLICATED_MUON),
    Rule('--use-precision-aware-optimizer', GIVEN, 'install it, or leave the flag out',
         'no other Adam supports state of 16 and 8 bits', WITHOUT_ADAM),
    Rule('--fp16', GIVEN, 'add --accumulate-allreduce-grads-in-fp32',
         'upstream does not clip the fp16 gradients of this combination', GRADIENTS_IN_FP16),
    Rule('--main-params-dtype', ANY,
         'give fp16 with --fp8-recipe delayed, and fp32 with tensorwise or blockwise',
         'upstream fails: with delayed scaling its Adam keeps the masters, but only 16 bits of an '
         'fp32 master, and an fp8 weight lacks the others; else Megatron keeps them, in fp32',
         MASTERS_AGAINST_RECIPE),
    Rule('--exp-avg-dtype', SCALED, _UNSCALED, _LOSES_SCALES, SCALES_LOST),
    Rule('--exp-avg-sq-dtype', SCALED, _UNSCALED, _LOSES_SCALES, SCALES_LOST),
    Rule('--optimizer-cpu-offload', GIVEN, 'leave it out',
         'its state moves during a capture'),
    Rule('--optimizer-cuda-graph', GIVEN, 'leave it out',
         'a recorded update cannot skip frozen operators'),
    Rule('--overlap-param-gather-with-optimizer-step', GIVEN, 'use --overlap-param-gather',
         'parameters are gathered while others are still updated'),
    Rule('--qk-clip', GIVEN, 'leave it out', 'it changes weights outside of the optimizer'),
    Rule('--fp8-format', ANY, 'install it, or train in bf16',
         'upstream would silently compute in 16 bits', WITHOUT_ENGINE, dest='fp8'),
    Rule('--fp8-recipe', equal_to('delayed'), 'use another --fp8-recipe',
         'modules join the reductions of scales after their first pass, of which a restarted '
         'process has no record', DELAYED_IN_PARTS),
    Rule('--fp8-quantizer-factory', GIVEN, 'use another --fp8-recipe than custom',
         'the state of a custom quantizer is not captured'),
    Rule('--fp4-format', ANY, 'leave it out', _SCALING, dest='fp4'),
    Rule('--fp8-param-gather', GIVEN, 'use --fp8-recipe delayed, tensorwise or blockwise',
         'mxfp8 rounds rows and columns separately, and only one of them would be captured',
         UNTRIED_WEIGHTS),
    Rule('--fp4-param-gather', GIVEN, 'leave it out', _SCALING),
    Rule('--te-precision-config-file', GIVEN, 'leave it out', _SCALING),
    Rule('--freeze-all-layers', GIVEN, 'leave out --sparse-ckpt', 'nothing is trained'),
    # Sharding
    Rule('--use-megatron-fsdp', GIVEN, 'use --use-distributed-optimizer', _SHARDED),
    Rule('--use-torch-fsdp2', GIVEN, 'use --use-distributed-optimizer', _SHARDED),
    Rule('--init-model-with-meta-device', GIVEN, 'leave it out',
         'only FSDP initializes the weights'),
    Rule('--tensor-parallel-num-weight-shards', ANY, 'leave it out', _SHARDED,
         _more_than('tensor_parallel_num_weight_shards', 'tensor_model_parallel_size')),
    Rule('--expert-tensor-parallel-num-weight-shards', ANY, 'leave it out', _SHARDED,
         _more_than('expert_tensor_parallel_num_weight_shards', 'expert_tensor_parallel_size')),
    Rule('--lazy-mpu-init', GIVEN, 'leave it out',
         'process groups must exist when the model is built'),
    Rule('--fake-process-group', GIVEN, 'leave it out', 'its ranks do not communicate'),
    # Schedule
    Rule('--cuda-graph-impl', equal_to('local'),
         'use --cuda-graph-impl transformer_engine or full_iteration',
         'recording draws random numbers, and a restarted process records later'),
    Rule('--cuda-graph-warmup-steps', equal_to(0), 'give 1 or more',
         'passes would be recorded before a recovery replays, and compute all gradients', _RECORDS),
    Rule('--use-grouped-gemm-for-shared-expert', GIVEN, 'leave out one of the two',
         'its delayed weight gradients cannot be skipped for frozen operators', _DELAYED),
    Rule('--defer-embedding-wgrad-compute', GIVEN, 'leave it out',
         'the output layer keeps inputs for later gradients, also when it is frozen'),
    Rule('--use-ring-exchange-p2p', GIVEN, 'leave it out',
         'its connections need a modified torch'),
    Rule('--hybrid-context-parallel', GIVEN, 'use --context-parallel-size',
         'it reads ahead of the counted samples'),
    Rule('--moe-expert-rank-capacity-factor', ANY, 'leave it out',
         'an iteration may run twice, and then logs what its stages send twice'),
    # Model
    Rule('--use-transformer-engine-op-fuser', GIVEN, 'leave it out',
         'fused operations cannot be frozen one by one'),
    Rule('--moe-single-grouped-weight', GIVEN, 'leave it out',
         'experts that share a parameter cannot be captured one by one'),
    Rule('--moe-single-grouped-bias', GIVEN, 'leave it out',
         'experts that share a parameter cannot be captured one by one'),
    Rule('--moe-router-force-biased', ANY, 'leave it out',
         'its random biases are not captured'),
    Rule('--transformer-impl', equal_to('inference_optimized'),
         'use transformer_engine or local', 'it cannot train'),
    Rule('--is-hybrid-model', GIVEN, 'train a GPT', _NO_GPT),
    Rule('--hybrid-layer-pattern', GIVEN, 'train a GPT', _NO_GPT),
    Rule('--experimental-attention-variant', GIVEN, 'leave it out',
         'the state of experimental variants is not known'),
    Rule('--use-kitchen-attention', GIVEN, 'leave it out', _SCALING),
    Rule('--vision-pretraining', GIVEN, 'train a GPT', _NO_GPT),
    # Random numbers
    Rule('--inference-rng-tracker', GIVEN, 'leave it out', 'it is for inference'),
    Rule('--moe-router-enable-expert-bias', GIVEN, _NO_RERUN, _MOVED_TWICE, _RERUNS),
    Rule('--moe-router-load-balancing-type', Values('with quantile_balancing', _balances_quantiles),
         _NO_RERUN, _MOVED_TWICE, _RERUNS),
    Rule('--error-injection-rate', above(0), 'leave it out',
         'a replay would draw other errors than training'),
    # Training data and starting point
    Rule('--perform-rl-step', GIVEN, 'leave it out', 'generated samples are not captured'),
    Rule('--sft', GIVEN, 'leave it out', _NO_DATA),
    Rule('--fim-data', GIVEN, 'leave it out', _NO_DATA),
    Rule('--dataloader-inter-document-masking', GIVEN, 'use --reset-attention-mask', _NO_DATA),
    Rule('--skip-train', GIVEN, 'leave out --sparse-ckpt', 'nothing is trained'),
    Rule('--result-rejected-tracker-filename', GIVEN, 'leave it out',
         _NOT_SKIPPED),
    Rule('--iterations-to-skip', GIVEN, 'leave it out', _NOT_SKIPPED),
    Rule('--yaml-cfg', GIVEN, 'give flags', 'it replaces the flags of sparse checkpointing'),
    Rule('--moe-use-upcycling', GIVEN, _FIRST, 'it writes a checkpoint while the model is built'),
    Rule('--ckpt-convert-format', GIVEN, 'leave out --sparse-ckpt', 'nothing is trained'),
    Rule('--pretrained-checkpoint', GIVEN, _FIRST,
         'it is loaded at each start, whatever the windows hold'),
    Rule('--override-ckpt-iteration', ANY, _FIRST,
         'windows and dense checkpoints would count differently'),
    Rule('--phase-transition-iterations', GIVEN, 'add --save, and --load for the next phase',
         'a phase ends with a dense checkpoint, from which the next phase starts; from windows the '
         'job would reach the end of the same phase again', _NOT_SAVED),
    Rule('--finetune', GIVEN, _ONCE, _FORGETS, _SAVE_IS_LOAD),
    Rule('--no-load-optim', GIVEN, _ONCE, _FORGETS, _SAVE_IS_LOAD),
    Rule('--no-load-rng', GIVEN, _ONCE, _FORGETS, _SAVE_IS_LOAD),
    Rule('--no-save-optim', GIVEN, 'save them', 'a restart could not load the saved checkpoint',
         _SAVE_IS_LOAD),
    Rule('--no-save-rng', GIVEN, 'save them', 'a restart could not load the saved checkpoint',
         _SAVE_IS_LOAD),
    Rule('--sparse-ckpt-elastic', equal_to(RESTART),
         'give the size that the log of an earlier start names ("setting global batch size to"); '
         'with --step-batch-size-schedule, which excludes that flag, leave this one out',
         'by default the batch follows the number of data-parallel ranks, and another batch is '
         'another training, which starts over', _DEFAULT_BATCH),
    # Output of an iteration
    Rule('--save-params-interval', ANY, 'leave it out', _DUMPED),
    Rule('--save-wgrads-interval', ANY, 'leave it out', _DUMPED),
    Rule('--save-dgrads-interval', ANY, 'leave it out', _DUMPED),
    Rule('--save-activations-interval', ANY, 'leave it out', _DUMPED),
    Rule('--save-tokens-per-expert-interval', ANY, 'leave it out', _DUMPED),
    Rule('--logits-save-dir', GIVEN, 'leave it out', _DUMPED),
    Rule('--logits-load-dir', GIVEN, 'leave it out',
         'logits read ahead are not moved back with the data'),
    Rule('--inprocess-restart', GIVEN, 'leave it out', 'it restarts workers in its own way'),
    Rule('--exit-signal-handler-for-training', GIVEN, 'use --exit-signal-handler',
         'a worker that gets a signal would wait for all others, and end as if it had finished'),
)  # fmt: skip
