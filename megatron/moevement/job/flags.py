# SPDX-License-Identifier: Apache-2.0
"""All that is known about flags of Megatron, with the reason: what each means to a recovery.

- A flag in `REFUSED` or `WHOLE_JOB` excludes sparse checkpointing, or only its localized recovery,
  with some values. A flag without a rule allows a localized recovery with equal bits.
- Every flag counts for the identity of the run (`job/identity.py`), so no job resumes from windows
  of another value, unless it is listed as one that cannot change a bit, or belongs to the layout.

The start of a job reports the first rule that applies; `checking` reports all, in the same words.
A new flag of upstream counts until it is known to have no effect on bits, and needs a rule only
once it is found to break recovery. `docs/compatibility.md` is generated from this file and
`flags.toml` (`python -m tools.compatibility --write`).
"""

import tomllib
from pathlib import Path

import megatron.core

from megatron.moevement.facts import Settings
from megatron.moevement.job.computing import release_of
from megatron.moevement.job.flag_rules import (
    ANY,
    BALANCES_QUANTILES,
    CYCLIC_EVALUATIONS,
    DEFAULT_BATCH,
    DELAYED_EVALUATIONS,
    DELAYED_IN_PARTS,
    EVALUATIONS,
    FP8,
    FP16_GRADIENTS,
    MASTERS_AGAINST_RECIPE,
    NEITHER_ADAM_NOR_MUON,
    NOT_REPLICATED_MUON,
    NOT_SAVED,
    PREDICTS_EARLY,
    RERUNS,
    SAVE_IS_LOAD,
    SCALED,
    SCALES_LOST,
    TRUE,
    UNTRIED_WEIGHTS,
    VALIDATED,
    WITHOUT_ADAM,
    WITHOUT_ENGINE,
    Rule,
    above,
    equal_to,
    having,
    keeps_fp8_masters,
    leaves_scales_of_others,
    more_shards_than,
    other_than,
)
from megatron.moevement.seams.patches import CHECKED_VERSION
from moevement_ext.config import RESTART, ConfigurationError

_TABLES = tomllib.loads(Path(__file__).with_suffix('.toml').read_text('utf-8'))
NO_BIT: dict[str, str] = _TABLES['no_bit']
"""Settings that change no bit of training, by what they are about."""
LAYOUT = frozenset(_TABLES['layout'].split())
"""Settings of the parallel layout, which has a digest of its own."""
MAY_CHANGE = frozenset(_TABLES['may_change'].split())
"""Settings of the run that decide how a layout works, not what is trained."""
INDIFFERENT = frozenset(' '.join((*NO_BIT.values(), _TABLES['progress'])).split())
"""All settings that do not count."""


def counts(name: str) -> bool:
    """True unless a setting cannot change what training computes, or belongs to the layout."""
    return name not in INDIFFERENT | LAYOUT and not name.startswith('sparse_ckpt')


def _alike(flags: str, reason: str, instead: str = 'leave it out') -> tuple[Rule, ...]:
    """Rules for several flags that are given, with one reason."""
    return tuple(Rule(flag, reason, instead=instead) for flag in flags.split())


_FIRST = 'write a first checkpoint without --sparse-ckpt, and --load that'
_NO_RERUN = 'add --rerun-mode disabled'
_MOVED_TWICE = (
    'an iteration with a spike runs twice, and then updates router biases twice, but not in a '
    'process that has just started'
)
_NO_DATA = 'pretrain_gpt.py has no data for it'
_DUMPED = 'a replay writes the files of its iterations again, from weights that are partly stale'
_SHARDED = 'the state that it shards is not captured'
_SCALING = 'its scaling state is not captured'
_UNSCALED = 'use fp32 or bf16, or leave --save and --load out'
_LOSES_SCALES = 'upstream saves these moments without their scales if it holds the masters'
_FORGETS = 'a restart from a newer dense checkpoint would continue with another state'
_NOT_LOADED = 'a restart could not load the saved checkpoint'

REFUSED = (
    # Optimizer and precision
    Rule('--optimizer', 'the state of other optimizers is not captured',
         values=NEITHER_ADAM_NOR_MUON, when=NOT_REPLICATED_MUON,
         instead='use --optimizer adam, or muon without --use-distributed-optimizer'),
    Rule('--use-precision-aware-optimizer', 'no other Adam supports state of 16 and 8 bits',
         when=WITHOUT_ADAM, instead='install it, or leave the flag out'),
    Rule('--fp16', 'upstream does not clip the fp16 gradients of this combination',
         when=FP16_GRADIENTS, instead='add --accumulate-allreduce-grads-in-fp32'),
    Rule('--main-params-dtype',
         'upstream fails: with delayed scaling its Adam keeps the masters, but only 16 bits of an '
         'fp32 master, and an fp8 weight lacks the others; else Megatron keeps them, in fp32',
         values=ANY, when=MASTERS_AGAINST_RECIPE,
         instead='give fp16 with --fp8-recipe delayed, and fp32 with tensorwise or blockwise'),
    Rule('--exp-avg-dtype', _LOSES_SCALES, values=SCALED, when=SCALES_LOST, instead=_UNSCALED),
    Rule('--exp-avg-sq-dtype', _LOSES_SCALES, values=SCALED, when=SCALES_LOST, instead=_UNSCALED),
    Rule('--optimizer-cpu-offload', 'its state moves during a capture'),
    Rule('--optimizer-cuda-graph', 'a recorded update cannot skip frozen operators'),
    Rule('--overlap-param-gather-with-optimizer-step',
         'parameters are gathered while others are still updated',
         instead='use --overlap-param-gather'),
    Rule('--qk-clip', 'it changes weights outside of the optimizer'),
    Rule('--fp8-format', 'upstream would silently compute in 16 bits', values=ANY, dest='fp8',
         when=WITHOUT_ENGINE, instead='install it, or train in bf16'),
    Rule('--fp8-recipe',
         'modules join the reductions of scales after their first pass, of which a restarted '
         'process has no record',
         values=equal_to('delayed'), when=DELAYED_IN_PARTS, instead='use another --fp8-recipe'),
    Rule('--fp8-quantizer-factory', 'the state of a custom quantizer is not captured',
         instead='use another --fp8-recipe than custom'),
    Rule('--fp4-format', _SCALING, values=ANY, dest='fp4'),
    Rule('--fp8-param-gather',
         'mxfp8 rounds rows and columns separately, and only one of them would be captured',
         when=UNTRIED_WEIGHTS, instead='use --fp8-recipe delayed, tensorwise or blockwise'),
    *_alike('--fp4-param-gather --te-precision-config-file', _SCALING),
    Rule('--freeze-all-layers', 'nothing is trained', instead='leave out --sparse-ckpt'),
    # Sharding
    *_alike('--use-megatron-fsdp --use-torch-fsdp2', _SHARDED, 'use --use-distributed-optimizer'),
    Rule('--init-model-with-meta-device', 'only FSDP initializes the weights'),
    Rule('--tensor-parallel-num-weight-shards', _SHARDED, values=ANY, when=more_shards_than(
         'tensor_model_parallel_size', shards='tensor_parallel_num_weight_shards')),
    Rule('--expert-tensor-parallel-num-weight-shards', _SHARDED, values=ANY, when=more_shards_than(
         'expert_tensor_parallel_size', shards='expert_tensor_parallel_num_weight_shards')),
    Rule('--lazy-mpu-init', 'process groups must exist when the model is built'),
    Rule('--fake-process-group', 'its ranks do not communicate'),
    # Schedule
    Rule('--cuda-graph-impl',
         'recording draws random numbers, and a restarted process records later',
         values=equal_to('local'),
         instead='use --cuda-graph-impl transformer_engine or full_iteration'),
    Rule('--cuda-graph-warmup-steps',
         'passes would be recorded before a recovery replays, and compute all gradients',
         values=equal_to(0), instead='give 1 or more', when=having(
             'with --cuda-graph-impl transformer_engine', 'cuda_graph_impl', 'transformer_engine')),
    Rule('--use-grouped-gemm-for-shared-expert',
         'its delayed weight gradients cannot be skipped for frozen operators',
         when=having('with --delay-wgrad-compute', 'delay_wgrad_compute'),
         instead='leave out one of the two'),
    Rule('--defer-embedding-wgrad-compute',
         'the output layer keeps inputs for later gradients, also when it is frozen'),
    Rule('--use-ring-exchange-p2p', 'its connections need a modified torch'),
    Rule('--hybrid-context-parallel', 'it reads ahead of the counted samples',
         instead='use --context-parallel-size'),
    Rule('--moe-expert-rank-capacity-factor',
         'an iteration may run twice, and then logs what its stages send twice', values=ANY),
    # Model
    Rule('--use-transformer-engine-op-fuser', 'fused operations cannot be frozen one by one'),
    *_alike('--moe-single-grouped-weight --moe-single-grouped-bias',
            'experts that share a parameter cannot be captured one by one'),
    Rule('--moe-router-force-biased', 'its random biases are not captured', values=ANY),
    Rule('--transformer-impl', 'it cannot train', values=equal_to('inference_optimized'),
         instead='use transformer_engine or local'),
    *_alike('--is-hybrid-model --hybrid-layer-pattern --vision-pretraining',
            'other layers and models are not supported', 'train a GPT'),
    Rule('--experimental-attention-variant', 'the state of experimental variants is not known'),
    Rule('--use-kitchen-attention', _SCALING),
    # Random numbers
    Rule('--inference-rng-tracker', 'it is for inference'),
    Rule('--moe-router-enable-expert-bias', _MOVED_TWICE, when=RERUNS, instead=_NO_RERUN),
    Rule('--moe-router-load-balancing-type', _MOVED_TWICE, values=BALANCES_QUANTILES, when=RERUNS,
         instead=_NO_RERUN),
    Rule('--error-injection-rate', 'a replay would draw other errors than training',
         values=above(0)),
    # Training data and starting point
    Rule('--perform-rl-step', 'generated samples are not captured'),
    *_alike('--sft --fim-data', _NO_DATA),
    Rule('--dataloader-inter-document-masking', _NO_DATA, instead='use --reset-attention-mask'),
    *_alike('--skip-train --ckpt-convert-format', 'nothing is trained', 'leave out --sparse-ckpt'),
    *_alike('--result-rejected-tracker-filename --iterations-to-skip',
            'a replay does not skip these iterations'),
    Rule('--yaml-cfg', 'it replaces the flags of sparse checkpointing', instead='give flags'),
    Rule('--moe-use-upcycling', 'it writes a checkpoint while the model is built', instead=_FIRST),
    Rule('--pretrained-checkpoint', 'it is loaded at each start, whatever the windows hold',
         instead=_FIRST),
    Rule('--override-ckpt-iteration', 'windows and dense checkpoints would count differently',
         values=ANY, instead=_FIRST),
    Rule('--phase-transition-iterations',
         'a phase ends with a dense checkpoint, from which the next phase starts; from windows the '
         'job would reach the end of the same phase again',
         when=NOT_SAVED, instead='add --save, and --load for the next phase'),
    *(Rule(flag, _FORGETS, when=SAVE_IS_LOAD,
           instead=f'leave it out; if the first start needs it, {_FIRST}')
      for flag in ('--finetune', '--no-load-optim', '--no-load-rng')),
    *(Rule(flag, _NOT_LOADED, when=SAVE_IS_LOAD, instead='save them')
      for flag in ('--no-save-optim', '--no-save-rng')),
    Rule('--sparse-ckpt-elastic',
         'by default the batch follows the number of data-parallel ranks, and another batch is '
         'another training, which starts over',
         values=equal_to(RESTART), when=DEFAULT_BATCH,
         instead='give the size that the log of an earlier start names ("setting global batch size '
         'to"); with --step-batch-size-schedule, which excludes that flag, leave this one out'),
    # Output of an iteration
    *(Rule(f'--save-{what}-interval', _DUMPED, values=ANY)
      for what in ('params', 'wgrads', 'dgrads', 'activations', 'tokens-per-expert')),
    Rule('--logits-save-dir', _DUMPED),
    Rule('--logits-load-dir', 'logits read ahead are not moved back with the data'),
    Rule('--inprocess-restart', 'it restarts workers in its own way'),
    Rule('--exit-signal-handler-for-training',
         'a worker that gets a signal would wait for all others, and end as if it had finished',
         instead='use --exit-signal-handler'),
)  # fmt: skip
"""Flags with which a job is not started."""

_WIDER = 'the stage of these layers sends more than the log has space for'
_DRAWS = 'an evaluation draws random numbers, which a stage that replays alone cannot draw again'
_NO_EVALUATIONS = 'leave it or evaluations (--eval-iters 0) out'
_TWICE = 'an iteration may run twice, which a stage that replays alone cannot do'
_HANDLES = 'handles to the memory of peers are not reconnected in place'
_HALF_DONE = 'transfers of an interrupted iteration are not undone'
_TOGETHER = 'all ranks must run the steps after an iteration together, also an interrupted one'

WHOLE_JOB = (
    # Schedule
    Rule('--pipeline-model-parallel-layout', _WIDER, values=PREDICTS_EARLY,
         instead='put m into the last stage'),
    # A group that is connected before its first operation, as recovery requires, gets one stream
    # from torch for all sends and receives. On four stages, two of these exchanges then deadlock in
    # a ring.
    Rule('--overlap-p2p-communication-warmup-flush',
         'a reconnected group sends and receives one after the other, in an order in which these '
         'stages deadlock',
         when=having('with --distributed-backend nccl', 'distributed_backend', 'nccl'),
         dest='overlap_p2p_comm_warmup_flush'),
    Rule('--mtp-standalone', _WIDER),
    Rule('--fine-grained-activation-offloading', _HALF_DONE),
    Rule('--cpu-offloading-num-layers', _HALF_DONE, values=above(0)),
    Rule('--check-for-large-grads', _TWICE, when=VALIDATED, instead=_NO_RERUN),
    Rule('--check-for-spiky-loss', _TWICE, when=VALIDATED, instead=_NO_RERUN),
    Rule('--rerun-mode', 'every iteration runs twice, and logs what its stages send twice',
         values=equal_to('report_stats'), instead=_NO_RERUN),
    Rule('--cuda-graph-impl', 'recorded passes keep the communicators of their recording',
         values=other_than('none'), instead='use --cuda-graph-impl none'),
    # Communicators
    Rule('--moe-token-dispatcher-type', _HANDLES, values=equal_to('flex'),
         instead='use --moe-token-dispatcher-type alltoall'),
    Rule('--tp-comm-overlap', _HANDLES),
    Rule('--use-nccl-ub', _HANDLES, dest='nccl_ub'),
    Rule('--symmetric-ar-type', _HANDLES),
    Rule('--use-sharp', 'resources of switches are not released in place'),
    *_alike('--high-priority-stream-groups --nccl-communicator-config-path',
            'groups of a replacement are created without NCCL options'),
    Rule('--pipeline-model-parallel-comm-backend', 'groups of UCC cannot be reconnected',
         values=equal_to('ucc')),
    Rule('--hierarchical-context-parallel-sizes',
         'groups within the context-parallel group have never been reconnected'),
    Rule('--disable-gloo-process-groups',
         'a replacement cannot tell gloo groups from those of NCCL', values=TRUE,
         when=having('is missing beside --distributed-backend nccl', 'distributed_backend', 'nccl'),
         instead='add it', dest='use_gloo_process_groups'),
    # Random numbers
    Rule('--moe-input-jitter-eps', _DRAWS, when=EVALUATIONS, instead=_NO_EVALUATIONS),
    Rule('--moe-router-force-load-balancing', _DRAWS, when=EVALUATIONS, instead=_NO_EVALUATIONS),
    Rule('--eval-interval', _DRAWS, values=above(0), when=CYCLIC_EVALUATIONS,
         instead='use --dataloader-type single, or --eval-iters 0'),
    # Evaluations
    Rule('--eval-iters',
         'an evaluation changes the amax histories of the scales, and a stage that replays alone '
         'does not repeat it',
         values=above(0), when=DELAYED_EVALUATIONS,
         instead='use another --fp8-recipe, or --eval-iters 0'),
    # Data
    Rule('--dataloader-type', 'an external data loader cannot be moved back',
         values=equal_to('external'), instead='use single or cyclic'),
    *_alike('--full-validation --multiple-validation-sets --dump-param-to-param-group-map',
            'all ranks act together during set-up, which a replacement runs alone'),
    # Steps after an iteration
    Rule('--phase-transition-iterations', _TOGETHER),
    Rule('--async-save',
         'ranks agree on the end of a running save, of which a replacement has no record'),
    Rule('--non-persistent-ckpt-type', 'its replicas have separate process groups',
         values=equal_to('local')),
    Rule('--check-weight-hash-across-dp-replicas-interval', _TOGETHER, values=ANY),
    Rule('--gpu-sniff-test-interval', _TOGETHER, values=ANY),
    *_alike('--adlr-autoresume --log-straggler', _TOGETHER),
    Rule('--moe-routing-trace-path', 'a replay would write its iterations into the trace again'),
    # Launchers
    Rule('--enable-ft-package', 'its monitor ends workers that wait for a replacement',
         instead='use torchrun, the launcher for Slurm or moevement launch'),
)  # fmt: skip
"""Flags with which a failure restarts all workers, which recover together from host memory."""


def refusals(settings: Settings) -> list[str]:
    """Flags with state that sparse checkpointing does not capture or replay, each with a remedy."""
    return [
        f'--sparse-ckpt does not support {rule.shown(settings)}: {rule.instead}; {rule.reason}.'
        for rule in REFUSED
        if rule.applies(settings)
    ]


def refuse_unsupported(settings: Settings) -> None:
    """Refuse flags with state that sparse checkpointing does not capture or replay.

    Raises:
        ConfigurationError: the message names the first such flag.
    """
    for refusal in refusals(settings):
        raise ConfigurationError(refusal)


def whole_job_reasons(settings: Settings) -> list[str]:
    """Flags that exclude a localized recovery, each with a remedy."""
    return [
        f'{rule.shown(settings)}: {rule.reason}; for a localized recovery {rule.instead}'
        for rule in WHOLE_JOB
        if rule.applies(settings)
    ]


def not_localized(settings: Settings) -> str | None:
    """The first reason that excludes a localized recovery; None if there is none."""
    return next(iter(whole_job_reasons(settings)), None)


def hazard(settings: Settings) -> str | None:
    """Effects by which these flags may harm training itself; None if none is known."""
    found = [words for applies, words in _HAZARDS if applies(settings)]
    return '; '.join(found) or None


def _has_fp8_moments(settings: Settings) -> bool:
    names = ('exp_avg_dtype', 'exp_avg_sq_dtype')
    narrow = any(str(settings.get(name)) in FP8 for name in names)
    return narrow and not keeps_fp8_masters(settings)  # fp8 masters tell Adam how to round


def _is_unchecked(_settings: Settings) -> bool:
    release = str(megatron.core.__version__).partition('+')[0]  # without a commit
    return not CHECKED_VERSION.endswith(f' {release}')


_RELEASE = ' in '.join(map(str, release_of('megatron-core').values()))
# Pairs of predicate and message.
_HAZARDS = (
    (
        _is_unchecked,
        f'only {CHECKED_VERSION} was checked, not {_RELEASE}, in which a part may keep its name '
        'but change its meaning; rehearse a failure first (moevement drill)',
    ),
    (
        _has_fp8_moments,
        'moments in fp8 become NaN if all gradients of a parameter are zero in its first step, as '
        'those of an expert without tokens; use fp16 or bf16 unless every expert is used',
    ),
    (
        keeps_fp8_masters,
        'with masters in fp8 updates that are small relative to a weight are lost; compare losses '
        'with those of --main-params-dtype fp16 (moevement bench overhead --precision all)',
    ),
    (
        leaves_scales_of_others,
        'with --fp8-recipe delayed and --fp8-param-gather upstream by its source code leaves the '
        'scale of a weight as it was on data-parallel ranks that own no part of it; compare the '
        'losses with those of a single data-parallel rank',
    ),
)
