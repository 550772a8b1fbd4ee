# SPDX-License-Identifier: Apache-2.0
"""Configurations of upstream that sparse checkpointing refuses, or recovers as a whole job only."""

from megatron.moevement.facts import UpstreamArguments
from moevement_ext.config import ConfigurationError


def refuse_unsupported(args: UpstreamArguments) -> None:
    """Refuse what sparse checkpointing does not capture or replay yet.

    Raises:
        ConfigurationError: naming the flag.
    """
    rules = [
        (args.optimizer != 'adam', f'--optimizer {args.optimizer}', 'use --optimizer adam'),
        (args.use_megatron_fsdp, '--use-megatron-fsdp', 'use the distributed optimizer'),
        (args.use_torch_fsdp2, '--use-torch-fsdp2', 'use the distributed optimizer'),
        (args.use_precision_aware_optimizer, '--use-precision-aware-optimizer', 'leave it out'),
        (args.optimizer_cpu_offload, '--optimizer-cpu-offload', 'leave it out'),
        (args.fp8_param_gather, '--fp8-param-gather', 'leave it out'),
        (args.fp4_param_gather, '--fp4-param-gather', 'leave it out'),
        (args.fp8 is not None, f'--fp8-format {args.fp8}', 'its scaling state is not captured yet'),
        (args.fp4 is not None, f'--fp4-format {args.fp4}', 'its scaling state is not captured yet'),
        (args.cuda_graph_impl != 'none', f'--cuda-graph-impl {args.cuda_graph_impl}', 'use none'),
        (
            args.overlap_param_gather_with_optimizer_step,
            '--overlap-param-gather-with-optimizer-step',
            'leave it out',
        ),
        (args.optimizer_cuda_graph, '--optimizer-cuda-graph', 'leave it out'),
        (args.qk_clip, '--qk-clip', 'leave it out'),
        (args.perform_rl_step, '--perform-rl-step', 'sparse checkpointing is for pre-training'),
        (bool(args.iterations_to_skip), '--iterations-to-skip', 'leave it out'),
        (args.skip_train, '--skip-train', 'leave out --sparse-ckpt'),
    ]
    for broken, flag, remedy in rules:
        if broken:
            raise ConfigurationError(f'--sparse-ckpt does not support {flag}: {remedy}.')


def not_localized(args: UpstreamArguments) -> str | None:
    """Why localized recovery is not possible with these flags, None if it is."""
    rules = [
        (args.dataloader_type == 'external', 'an external data loader cannot be moved back'),
        (args.full_validation, '--full-validation'),
        (args.multiple_validation_sets, '--multiple-validation-sets'),
        (args.phase_transition_iterations, '--phase-transition-iterations'),
        (args.num_distributed_optimizer_instances > 1, 'several distributed optimizer instances'),
        (args.async_save, '--async-save keeps process groups of its own'),
        (bool(args.mtp_num_layers), '--mtp-num-layers'),
        (args.variable_seq_lengths, '--variable-seq-lengths'),
        (args.log_straggler, '--log-straggler'),
        (
            bool(args.moe_input_jitter_eps and args.eval_interval and args.eval_iters),
            '--moe-input-jitter-eps draws random numbers in evaluations, which a stage that '
            'replays alone cannot draw again; --eval-interval 0 leaves them out',
        ),
        (
            args.check_weight_hash_across_dp_replicas_interval is not None,
            '--check-weight-hash-across-dp-replicas-interval',
        ),
        (args.gpu_sniff_test_interval is not None, '--gpu-sniff-test-interval'),
        (bool(args.moe_routing_trace_path), '--moe-routing-trace-path'),
        (
            args.check_for_large_grads and args.rerun_mode == 'validate_results',
            '--check-for-large-grads may run an iteration twice, which a stage that replays alone '
            'cannot; add --rerun-mode disabled',
        ),
        (
            args.distributed_backend == 'nccl' and args.use_gloo_process_groups,
            'gloo groups beside those of NCCL; add --disable-gloo-process-groups',
        ),
    ]
    return next((reason for broken, reason in rules if broken), None)
