# SPDX-License-Identifier: Apache-2.0
"""Flags that act only together with one that a rule names: the rule speaks for them."""

_COMPANIONS = {
    'optimizer':
        'sgd_momentum muon_momentum muon_split_qkv muon_nesterov muon_scale_mode '
        'muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps muon_tp_mode '
        'muon_extra_scale_factor muon_scalar_optimizer lion_beta1 lion_beta2 '
        'use_layer_wise_param_layout',
    'optimizer_cpu_offload':
        'optimizer_offload_fraction use_torch_optimizer_for_cpu_offload '
        'overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params',
    'qk_clip': 'qk_clip_alpha qk_clip_threshold',
    'fp8_param_gather': 'reuse_grad_buf_for_mxfp8_param_ag',
    'fp4': 'fp4_recipe fp4_quantizer_factory',
    'use_megatron_fsdp':
        'fsdp_manual_registration data_parallel_sharding_strategy outer_dp_sharding_strategy '
        'fsdp_double_buffer suggested_communication_unit_size keep_fp8_transpose_cache '
        'enable_full_sharding_in_hsdp strict_fsdp_dtensor_load megatron_fsdp_main_params_dtype '
        'megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype '
        'megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer '
        'fsdp_db_use_persist_buf_on_alloc_fail create_all_gather_group',
    'use_torch_fsdp2': 'torch_fsdp2_reshard_after_forward',
    'cuda_graph_impl': 'cuda_graph_modules',
    'defer_embedding_wgrad_compute': 'wgrad_deferral_limit',
    'hybrid_context_parallel': 'max_seqlen_per_dp_cp_rank',
    'moe_expert_rank_capacity_factor':
        'moe_paged_stash moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda '
        'moe_paged_stash_buffer_size_factor_cpu',
    'use_transformer_engine_op_fuser':
        'moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size',
    'is_hybrid_model':
        'mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path '
        'mamba_training_ssm_states_dtype',
    'experimental_attention_variant':
        'dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq '
        'dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss '
        'dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation '
        'dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 '
        'linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads '
        'linear_num_value_heads linear_attention_freq',
    'use_kitchen_attention': 'kitchen_attention_backend',
    'vision_pretraining':
        'vision_pretraining_type vision_backbone_type swin_backbone_type mask_type mask_factor '
        'iter_per_epoch dino_local_img_size dino_local_crops_number dino_head_hidden_size '
        'dino_bottleneck_size dino_freeze_last_layer dino_norm_last_layer '
        'dino_warmup_teacher_temp dino_teacher_temp dino_warmup_teacher_temp_epochs',
    'error_injection_rate': 'error_injection_type',
    'perform_rl_step':
        'rl_prompts_per_eval grpo_prompts_per_step grpo_group_size rl_generation_lag '
        'rl_submission_granularity rl_consumption_granularity grpo_iterations '
        'grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_kl_beta grpo_entropy_term_weight '
        'grpo_filter_groups_with_same_reward langrl_env_config rl_default_temperature '
        'rl_default_top_p rl_default_top_k rl_offload_optimizer_during_inference '
        'rl_kv_cache_management_mode rl_persist_cuda_graphs rl_partial_rollouts '
        'rl_inference_logprobs_is_correction rl_importance_sampling_truncation_coef '
        'rl_use_sequence_packing rl_sequence_packing_max_sequences_per_bin '
        'rl_sequence_packing_algo rl_training_cuda_graphs '
        'rl_inference_tensor_model_parallel_size rl_inference_pipeline_model_parallel_size '
        'rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size '
        'rl_inference_model_unified_memory_level rl_offload_inference_model_weights_when_idle '
        'refit_method rl_verify_model_weights_swap rl_skip_bos_token rl_profile rl_profile_dir '
        'rl_inference_parsers',
    'fim_data':
        'fim_rate fim_spm_rate fim_split_sample fim_fragment_rate fim_no_prefix fim_prefix_token '
        'fim_middle_token fim_suffix_token fim_pad_token fim_eod_token',
    'moe_use_upcycling': 'moe_upcycling_granularity',
    'ckpt_convert_format': 'ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format',
    'logits_save_dir':
        'logits_save_top_k logits_save_top_p logits_save_top_p_min_k logits_save_dtype',
    'logits_load_dir':
        'logits_load_decode_threads logits_load_prefetch_factor logits_load_msc_prefetch_depth '
        'logits_load_kd_loss_alpha logits_load_ignore_errors',
    'inprocess_restart':
        'inprocess_max_iterations inprocess_monitor_thread_interval '
        'inprocess_monitor_process_interval inprocess_progress_watchdog_interval '
        'inprocess_heartbeat_interval inprocess_soft_timeout inprocess_hard_timeout '
        'inprocess_heartbeat_timeout inprocess_barrier_timeout inprocess_completion_timeout '
        'inprocess_last_call_wait inprocess_termination_grace_time inprocess_granularity '
        'inprocess_active_world_size inprocess_empty_cuda_cache',
    'fine_grained_activation_offloading':
        'offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph '
        'delta_offload_bytes_across_pp_ranks activation_offload_fraction '
        'fine_grained_offloading_max_inflight_offloads',
    'cpu_offloading_num_layers': 'cpu_offloading_retain_pinned_cpu_buffers',
    'moe_token_dispatcher_type':
        'moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep '
        'moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms moe_deepep_num_sms '
        'moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute '
        'moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy',
    'tp_comm_overlap':
        'tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs '
        'tp_comm_overlap_rs_dgrad tp_comm_overlap_cfg tp_comm_bootstrap_backend '
        'tp_comm_split_ag tp_comm_split_rs',
    'nccl_ub': 'disable_symmetric_registration',
    'use_sharp': 'sharp_enabled_group',
    'multiple_validation_sets': 'validation_set_names',
    'non_persistent_ckpt_type':
        'non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo replication '
        'replication_jump replication_factor',
    'async_save':
        'async_strategy use_persistent_ckpt_worker async_ckpt_cpu_priority '
        'async_ckpt_io_priority async_ckpt_use_cpu_shm',
    'adlr_autoresume': 'adlr_autoresume_interval',
    'moe_routing_trace_path':
        'moe_routing_trace_max_training_iters moe_routing_trace_capture_logits '
        'moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights',
    'log_straggler': 'straggler_ctrlr_port straggler_minmax_count disable_straggler_on_startup',
    'enable_ft_package': 'calc_ft_timeouts ft_num_warmup_iters',
}  # fmt: skip

COMPANIONS = {leader: tuple(names.split()) for leader, names in _COMPANIONS.items()}
"""Settings, by the setting that makes them act."""
