# SPDX-License-Identifier: Apache-2.0
"""Flags with which a failure is recovered locally, every bit as if it had not happened.

A group's reason names the test that tries its flags, as `test_function[case]`. Without one it is an
argument, which begins with 'By reasoning'.
"""

from megatron.moevement.job.compatibility.rule import group

_LOST_STAGE = 'test_lost_stage_comes_back_with_the_bits_of_a_fault_free_run'
_WHOLE_JOB = 'test_recovered_run_has_the_bits_of_a_fault_free_run'
_UNEQUAL = 'test_replacement_has_the_parameter_groups_of_the_lost_worker'
_FLAGS = 'test_flags_that_are_recovered_locally'
_PRECISION = 'test_low_precision_state_is_recovered'
_FP8 = 'test_computation_in_fp8_is_recovered'
_MASTERS = 'test_weights_in_fp8_with_narrow_masters_are_recovered'
_SHAPES = 'By reasoning: sizes of what is captured and sent; all are read off the tensors.'
_FORWARD = (
    'By reasoning: a function of activations and weights; a replay computes it again by the same '
    'code, and nothing of it outlives an iteration.'
)
_START = (
    'By reasoning: decides the state that training starts from. A job that starts over begins '
    'with the same one.'
)
_KERNELS = (
    'By reasoning: a replay runs the kernels that training ran. Equal bits need deterministic '
    'ones (`--deterministic-mode`).'
)
_SCALARS = (
    'By reasoning: a constant of the update or the schedule; step counts and parameter groups '
    'are restored.'
)
_SAMPLES = (
    'By reasoning: decides which samples there are and what is in one; a sample is found again '
    'by the number of those consumed.'
)

EXACT = (
    # Layout
    group('pipeline', f'{_LOST_STAGE}[interleaved]',
          'pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage'),
    group('flushed warm-up', f'{_LOST_STAGE}[interleaved-overlapped-warmup]',
          'overlap_p2p_comm_warmup_flush'),
    group('layout of stages', f'{_FLAGS}[layout-of-stages]',
          'pipeline_model_parallel_layout microbatch_group_size_per_vp_stage'),
    group('order of ranks', f'{_FLAGS}[buckets]', 'use_tp_pp_dp_mapping'),
    group('uneven stages', f'{_FLAGS}[uneven-stages]',
          'decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers'),
    group('schedule without overlap', f'{_FLAGS}[interleaved-without-overlap]',
          'num_virtual_stages_per_pipeline_rank overlap_p2p_comm'),
    group('layers of two micro-batches in turns', f'{_FLAGS}[layers-in-turns]',
          'overlap_moe_expert_parallel_comm ep_overlap_early_attn_memory_release '
          'high_priority_a2a_comm_stream'),
    group('delayed weight gradients',
          'test_weight_gradients_that_are_computed_later, with stand-ins for the layers of '
          'Transformer Engine; a frozen one is not asked for its gradient.',
          'delay_wgrad_compute overlap_dispatch_backward_with_experts_wgrad'),
    group('counted layers', 'By reasoning: another way to say how long stages are.',
          'account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split'),
    group('tensor parallelism', f'{_LOST_STAGE}[pp2-tp2-sequence-parallel]',
          'tensor_model_parallel_size sequence_parallel'),
    group('expert parallelism', f'{_LOST_STAGE}[one-stage-ep2]', 'expert_model_parallel_size'),
    group('tensor parallelism of experts', f'{_FLAGS}[expert-tensor-parallel]',
          'expert_tensor_parallel_size'),
    group('context parallelism',
          'By reasoning, as upstream has it on GPUs only: its group lies within a stage, which '
          'replays as a whole.', 'context_parallel_size cp_comm_type'),
    group('backend', 'All tests run with gloo; for NCCL see the versions that are checked.',
          'distributed_backend'),
    # Gradients
    group('sharded optimizer', f'{_LOST_STAGE}[pp2-dp2-distributed]', 'use_distributed_optimizer'),
    group('several sharded optimizers', f'{_FLAGS}[optimizer-instances]',
          'num_distributed_optimizer_instances'),
    group('overlapped reductions', f'{_LOST_STAGE}[overlapped-reductions]',
          'overlap_grad_reduce overlap_param_gather'),
    group('buckets', f'{_FLAGS}[buckets]',
          'ddp_num_buckets align_grad_reduce gradient_reduce_div_fusion '
          'ddp_pad_buckets_for_high_nccl_busbw'),
    group('size and alignment of buckets',
          'By reasoning: as the number of buckets; a replay reduces in the same ones.',
          'ddp_bucket_size align_param_gather'),
    group('gradients in bf16', f'{_FLAGS}[rates-and-gradients]',
          'grad_reduce_in_bf16 ddp_average_in_collective'),
    group('accumulation in fp32', f'{_FLAGS}[fp32-accumulation]',
          'ddp_reduce_scatter_with_fp32_accumulation '
          'ddp_param_name_patterns_for_fp32_local_accumulation'),
    group('per-token loss', f'{_LOST_STAGE}[per-token-loss]', 'calculate_per_token_loss'),
    # Precision
    group('bf16', f'{_LOST_STAGE}[pp4-middle-stage]', 'bf16'),
    group('fp16 with a dynamic scale', f'{_LOST_STAGE}[fp16-skipped-steps]',
          'fp16 initial_loss_scale loss_scale_window'),
    group('hysteresis and lower bound of the scale',
          f'{_LOST_STAGE}[fp16-hysteresis-skips-on-both-sides]', 'hysteresis min_loss_scale'),
    group('fp16 with a fixed scale', f'{_FLAGS}[fp16-and-different-replicas]',
          'loss_scale fp16_lm_cross_entropy accumulate_allreduce_grads_in_fp32 '
          'apply_query_key_layer_scaling attention_softmax_in_fp32'),
    group('state of 16 bits', f'{_PRECISION}[fp16-everywhere]',
          'use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype'),
    group('masters of 16 and 8 bits', f'{_MASTERS}[c5]', 'main_params_dtype'),
    group('computation in fp8', f'{_FP8}[delayed]',
          'fp8 fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo'),
    group('weights in fp8', f'{_FP8}[weights-blockwise]', 'fp8_param_gather'),
    group('layers in bf16', f'{_FP8}[tensorwise]',
          'first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16'),
    group('parts of it',
          'By reasoning: a replay computes again in the same formats; beyond an iteration only '
          'delayed scaling keeps anything.',
          'fp8_interval fp8_wgrad fp8_output_proj'),
    group('gradients of 16 bits', f'{_PRECISION}[bf16-moments-and-gradients]', 'main_grads_dtype'),
    group('checks', 'test_job_that_ran_an_iteration_twice_recovers_as_a_whole',
          'check_for_nan_in_loss_and_grad'),
    # Optimizer and schedules
    group('rates of the ends', f'{_UNEQUAL}[stage without embedding]',
          'decoupled_lr decoupled_min_lr'),
    group('Muon', 'test_a_job_with_muon_is_recovered_locally', 'optimizer'),
    group('schedules', f'{_FLAGS}[rates-and-gradients]',
          'lr_decay_style lr_wsd_decay_style lr_wsd_decay_iters lr_decay_iters '
          'weight_decay_incr_style start_weight_decay end_weight_decay apply_wd_to_qk_layernorm '
          'adam_beta2'),
    group('constants of the update', f'{_SCALARS}',
          'lr min_lr weight_decay clip_grad adam_beta1 adam_eps lr_warmup_iters lr_warmup_init '
          'lr_warmup_fraction lr_warmup_samples lr_decay_samples lr_wsd_decay_samples '
          'override_opt_param_scheduler use_checkpoint_opt_param_scheduler train_iters '
          'train_samples'),
    group('maximal update parametrisation', f'{_FLAGS}[tied-learned-positions]',
          'use_mup mup_base_hidden_size'),
    group('its constants', _SCALARS,
          'mup_width_mult mup_embedding_mult mup_output_mult mup_base_head_dim '
          'mup_attn_scale_power'),
    # Random numbers
    group('dropout', 'test_deaths_in_evaluations_and_again_while_they_are_done_again',
          'hidden_dropout seed'),
    group('dropout in attention', f'{_WHOLE_JOB}[dropout-recompute]; a stage alone replays the '
          'same way.', 'attention_dropout'),
    group('generators of Transformer Engine',
          'test_random_numbers_of_generators_that_live_on, with a stand-in for its tracker.',
          'te_rng_tracker'),
    group('jitter', f'{_FLAGS}[global-aux-loss]', 'moe_input_jitter_eps'),
    group('random routing', f'{_FLAGS}[uneven-stages]; from a dense checkpoint: '
          'test_random_routing_goes_on_from_a_dense_checkpoint.',
          'moe_router_force_load_balancing'),
    group('different replicas', f'{_FLAGS}[fp16-and-different-replicas]',
          'data_parallel_random_init init_method_std'),
    group('first values', f'{_FLAGS}[expert-tensor-parallel]',
          'use_cpu_initialization embedding_init_method_std'),
    group('first values, otherwise', _START,
          'perform_initialization init_method_xavier_uniform use_checkpoint_args '
          'use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args load '
          'ckpt_step finetune no_load_optim no_load_rng load_main_params_from_ckpt'),
    # Model
    group('sizes', _SHAPES,
          'num_layers encoder_num_layers hidden_size num_attention_heads ffn_hidden_size '
          'kv_channels seq_length encoder_seq_length decoder_seq_length max_position_embeddings '
          'make_vocab_size_divisible_by vocab_size padded_vocab_size pad_vocab_size'),
    group('tied and untied ends', f'{_LOST_STAGE}[pp4-middle-stage]',
          'untie_embeddings_and_output_weights'),
    group('positions', f'{_FLAGS}[tied-learned-positions]',
          'position_embedding_type normalization'),
    group('residuals',
          'By reasoning, as the norms refuse it on a CPU: stages log and exchange that type.',
          'fp32_residual_connection'),
    group('attention', f'{_FLAGS}[capacity-and-attention]',
          'qk_layernorm group_query_attention num_query_groups add_qkv_bias rotary_percent '
          'rotary_interleaved use_rope_scaling'),
    group('other forms of attention', _FORWARD,
          'attention_output_gate qk_l2_norm softmax_type window_size window_attn_skip_freq '
          'yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow '
          'yarn_correction_range_round_to_int relative_attention_num_buckets '
          'relative_attention_max_distance use_rotary_position_embeddings rotary_base '
          'rotary_seq_len_interpolation_factor rope_scaling_factor no_rope_freq '
          'add_position_embedding rope_type mrope_section rotary_scaling_factor mscale '
          'mscale_all_dim multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim '
          'qk_pos_emb_head_dim v_head_dim'),
    group('other forms of layers', _FORWARD,
          'layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear glu_linear_offset '
          'activation_func_clamp_value squared_relu swiglu quick_geglu mlp_chunks_for_training '
          'clone_scatter_output_in_embedding apply_residual_connection_post_layernorm '
          'heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json'),
    group('layers of your own',
          'By reasoning, as far as their state is in parameters and registered buffers.',
          'spec enable_experimental'),
    group('prediction of more tokens', f'{_FLAGS}[more-tokens]',
          'mtp_num_layers mtp_loss_scaling_factor mtp_detach_heads'),
    group('its one layer, repeated', 'By reasoning: one operator, whose gradients add up.',
          'mtp_use_repeated_layer'),
    # Mixture of Experts
    group('experts', f'{_LOST_STAGE}[pp2-ep2-first-stage]',
          'num_experts moe_ffn_hidden_size moe_router_topk moe_aux_loss_coeff'),
    group('layers without experts', f'{_UNEQUAL}[stage without experts]', 'moe_layer_freq'),
    group('shared experts, routing by groups', f'{_FLAGS}[grouped-routing]',
          'moe_shared_expert_intermediate_size moe_shared_expert_gate '
          'moe_router_score_function moe_router_num_groups moe_router_group_topk '
          'moe_router_topk_scaling_factor moe_router_dtype moe_z_loss_coeff'),
    group('shared experts beside the exchange of tokens',
          'test_shared_experts_that_overlap_are_recovered_locally', 'moe_shared_expert_overlap'),
    group('losses that balance', f'{_FLAGS}[global-aux-loss]',
          'moe_router_load_balancing_type moe_router_pre_softmax moe_token_dispatcher_type'),
    group('bias of experts', f'{_LOST_STAGE}[router-bias]',
          'moe_router_enable_expert_bias moe_router_bias_update_rate'),
    group('balance by quantiles', f'{_FLAGS}[quantile-balancing]',
          'moe_router_quantile_balancing_ema'),
    group('capacity', f'{_FLAGS}[capacity-and-attention]',
          'moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy'),
    group('other forms of routing', _FORWARD,
          'moe_latent_size moe_apply_probs_on_input moe_router_padding_for_quantization '
          'moe_router_padding_for_fp8 moe_enable_routing_replay'),
    group('grouped experts',
          'test_experts_of_a_grouped_layer_thaw_together, and of the real layers '
          'test_experts_of_a_group_thaw_together; else by reasoning, as their kernels need a GPU.',
          'moe_grouped_gemm'),
    # Recomputation
    group('full recomputation', f'{_FLAGS}[block-recompute]',
          'recompute_granularity recompute_method recompute_num_layers'),
    group('distributed recomputation',
          'By reasoning, as upstream has it without experts only: full recomputation, with what it '
          'starts from spread over the tensor-parallel ranks.', 'distribute_saved_activations'),
    group('selective recomputation', f'{_FLAGS}[selective-recompute]', 'recompute_modules'),
    group('recomputation of a MoE layer', 'By reasoning: selective recomputation of `moe`.',
          'moe_layer_recompute'),
    # Kernels
    group('kernels', _KERNELS,
          'transformer_impl deterministic_mode attention_backend flash_attention_version '
          'disable_bf16_reduced_precision_matmul use_fused_weighted_squared_relu '
          'fused_residual_rmsnorm cross_entropy_loss_fusion cross_entropy_fusion_impl '
          'masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion '
          'apply_rope_fusion no_persist_layer_norm gradient_accumulation_fusion disable_jit_fuser '
          'use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert '
          'moe_permute_fusion moe_router_fusion use_te_activation_func mla_down_proj_fusion '
          'batch_invariant_mode'),
    # Data
    group('cyclic data', f'{_FLAGS}[cyclic-data]', 'dataloader_type'),
    group('evaluations', f'{_FLAGS}[batches-that-grow]',
          'eval_interval eval_iters eval_global_batch_size eval_micro_batch_size '
          'start_eval_at_iter'),
    group('batches', 'By reasoning: a function of the samples consumed, which are restored.',
          'micro_batch_size global_batch_size'),
    group('batches that grow', f'{_FLAGS}[batches-that-grow]', 'step_batch_size_schedule'),
    group('batches that do not fit', f'{_FLAGS}[fp32-accumulation]',
          'decrease_batch_size_if_needed'),
    group('masks', f'{_FLAGS}[capacity-and-attention]',
          'reset_position_ids reset_attention_mask eod_mask_loss'),
    group('processes of the loader', 'test_recoveries_with_loader_workers_have_the_same_bits',
          'num_workers'),
    group('samples', _SAMPLES,
          'data_path split train_data_path valid_data_path test_data_path data_args_path '
          'per_split_data_args_path mock_data data_sharding mid_level_dataset_surplus '
          'allow_ambiguous_pad_tokens create_attention_mask_in_dataloader tokenizer_type '
          'tokenizer_model vocab_file merge_file vocab_extra_ids metadata_path special_tokens '
          'tiktoken_pattern tiktoken_num_special_tokens tokenizer_sentencepiece_legacy '
          'tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast '
          'tokenizer_hf_no_include_special_tokens trust_remote_code null_tokenizer_eod_id '
          'null_tokenizer_pad_id chat_template'),
    # The end of a job
    group('exits', 'test_windows_are_kept_where_nothing_else_has_the_state',
          'exit_interval exit_duration_in_mins exit_signal_handler'),
    group('signal', 'By reasoning: as the handler.',
          'exit_signal exit_signal_handler_for_training exit_signal_handler_for_dataloader'),
    group('dense checkpoints', 'test_death_in_evaluation_and_dense_checkpoint',
          'save save_interval'),
    group('parts of them', 'By reasoning: windows have all, whatever a dense checkpoint has.',
          'no_save_optim no_save_rng'),
    group('rerun machine', 'test_job_that_ran_an_iteration_twice_recovers_as_a_whole',
          'rerun_mode'),
)  # fmt: skip
