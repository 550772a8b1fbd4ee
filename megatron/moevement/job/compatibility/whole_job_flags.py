# SPDX-License-Identifier: Apache-2.0
"""Flags with which a failure restarts all workers, which recover together from host memory."""

from megatron.moevement.facts import Settings
from megatron.moevement.job.compatibility.precision import DELAYED_EVALUATIONS
from megatron.moevement.job.compatibility.rule import (
    ANY,
    GIVEN,
    Condition,
    Rule,
    Values,
    above,
    equal_to,
    other_than,
)


def _evaluates(settings: Settings) -> bool:
    return bool(settings.get('eval_interval') and settings.get('eval_iters'))


def _evaluates_cyclic(settings: Settings) -> bool:
    cyclic = settings.get('dataloader_type') == 'cyclic'
    return cyclic and bool(settings.get('eval_iters'))


_CYCLIC = Condition('with --dataloader-type cyclic', _evaluates_cyclic)
_EVALUATIONS = Condition('with evaluations', _evaluates)
_VALIDATED = Condition(
    'without --rerun-mode disabled',
    lambda settings: settings.get('rerun_mode') == 'validate_results',
)


def _uses_nccl(settings: Settings) -> bool:
    return settings.get('distributed_backend') == 'nccl'


_WITH_NCCL = Condition('with --distributed-backend nccl', _uses_nccl)
_BESIDE_NCCL = Condition('is missing beside --distributed-backend nccl', _uses_nccl)

_PREDICTS_EARLY = Values(
    'with m before the last stage', lambda value: 'm' in str(value).rpartition('|')[0]
)

_WIDER = 'the stage of these layers sends more than the log has space for'
_NOTES = (
    'an evaluation changes the amax histories of the scales, and a stage that replays alone does '
    'not repeat it'
)
_DRAWS = 'an evaluation draws random numbers, which a stage that replays alone cannot draw again'
_TWICE = 'an iteration may run twice, which a stage that replays alone cannot do'
_HANDLES = 'handles to the memory of peers are not reconnected in place'
_OPTIONS = 'groups of a replacement are created without NCCL options'
_HALF_DONE = 'transfers of an interrupted iteration are not undone'
_SET_UP = 'all ranks act together during set-up, which a replacement runs alone'
_TOGETHER = 'all ranks must run the steps after an iteration together, also an interrupted one'

WHOLE_JOB = (
    # Schedule
    Rule('--pipeline-model-parallel-layout', _PREDICTS_EARLY, 'put m into the last stage',
         _WIDER),
    # A group that is connected before its first operation, as recovery requires, gets one stream
    # from torch for all sends and receives. On four stages, two of these exchanges then deadlock in
    # a ring.
    Rule('--overlap-p2p-communication-warmup-flush', GIVEN, 'leave it out',
         'a reconnected group sends and receives one after the other, in an order in which these '
         'stages deadlock',
         _WITH_NCCL, dest='overlap_p2p_comm_warmup_flush'),
    Rule('--mtp-standalone', GIVEN, 'leave it out', _WIDER),
    Rule('--fine-grained-activation-offloading', GIVEN, 'leave it out', _HALF_DONE),
    Rule('--cpu-offloading-num-layers', above(0), 'leave it out', _HALF_DONE),
    Rule('--check-for-large-grads', GIVEN, 'add --rerun-mode disabled', _TWICE, _VALIDATED),
    Rule('--check-for-spiky-loss', GIVEN, 'add --rerun-mode disabled', _TWICE, _VALIDATED),
    Rule('--rerun-mode', equal_to('report_stats'), 'add --rerun-mode disabled',
         'every iteration runs twice, and logs what its stages send twice'),
    Rule('--cuda-graph-impl', other_than('none'), 'use --cuda-graph-impl none',
         'recorded passes keep the communicators of their recording'),
    # Communicators
    Rule('--moe-token-dispatcher-type', equal_to('flex'),
         'use --moe-token-dispatcher-type alltoall', _HANDLES),
    Rule('--tp-comm-overlap', GIVEN, 'leave it out', _HANDLES),
    Rule('--use-nccl-ub', GIVEN, 'leave it out', _HANDLES, dest='nccl_ub'),
    Rule('--symmetric-ar-type', GIVEN, 'leave it out', _HANDLES),
    Rule('--use-sharp', GIVEN, 'leave it out', 'resources of switches are not released in place'),
    Rule('--high-priority-stream-groups', GIVEN, 'leave it out', _OPTIONS),
    Rule('--nccl-communicator-config-path', GIVEN, 'leave it out', _OPTIONS),
    Rule('--pipeline-model-parallel-comm-backend', equal_to('ucc'), 'leave it out',
         'groups of UCC cannot be reconnected'),
    Rule('--hierarchical-context-parallel-sizes', GIVEN, 'leave it out',
         'groups within the context-parallel group have never been reconnected'),
    Rule('--disable-gloo-process-groups', Values('', lambda value: value is True),
         'add it', 'a replacement cannot tell gloo groups from those of NCCL', _BESIDE_NCCL,
         dest='use_gloo_process_groups'),
    # Random numbers
    Rule('--moe-input-jitter-eps', GIVEN, 'leave it or evaluations (--eval-iters 0) out',
         _DRAWS, _EVALUATIONS),
    Rule('--moe-router-force-load-balancing', GIVEN,
         'leave it or evaluations (--eval-iters 0) out', _DRAWS, _EVALUATIONS),
    Rule('--eval-interval', above(0), 'use --dataloader-type single, or --eval-iters 0', _DRAWS,
         _CYCLIC),
    # Evaluations
    Rule('--eval-iters', above(0), 'use another --fp8-recipe, or --eval-iters 0', _NOTES,
         DELAYED_EVALUATIONS),
    # Data
    Rule('--dataloader-type', equal_to('external'), 'use single or cyclic',
         'an external data loader cannot be moved back'),
    Rule('--full-validation', GIVEN, 'leave it out', _SET_UP),
    Rule('--multiple-validation-sets', GIVEN, 'leave it out', _SET_UP),
    Rule('--dump-param-to-param-group-map', GIVEN, 'leave it out', _SET_UP),
    Rule('--phase-transition-iterations', GIVEN, 'leave it out', _TOGETHER),
    # Steps after an iteration
    Rule('--async-save', GIVEN, 'leave it out',
         'ranks agree on the end of a running save, of which a replacement has no record'),
    Rule('--non-persistent-ckpt-type', equal_to('local'), 'leave it out',
         'its replicas have separate process groups'),
    Rule('--check-weight-hash-across-dp-replicas-interval', ANY, 'leave it out', _TOGETHER),
    Rule('--gpu-sniff-test-interval', ANY, 'leave it out', _TOGETHER),
    Rule('--adlr-autoresume', GIVEN, 'leave it out', _TOGETHER),
    Rule('--moe-routing-trace-path', GIVEN, 'leave it out',
         'a replay would write its iterations into the trace again'),
    Rule('--log-straggler', GIVEN, 'leave it out', _TOGETHER),
    # Launchers
    Rule('--enable-ft-package', GIVEN,
         'use torchrun, the launcher for Slurm or moevement launch',
         'its monitor ends workers that wait for a replacement'),
)  # fmt: skip
