# SPDX-License-Identifier: Apache-2.0
"""Flags that training does not depend on, or not in this program."""

from megatron.moevement.job.compatibility.rule import group

WITHOUT_EFFECT = (
    group('logging', 'They say what happens.',
          'log_interval log_params_norm log_throughput log_progress timing_log_level '
          'timing_log_option barrier_with_L1_time tensorboard_dir tensorboard_log_interval '
          'tensorboard_queue_size log_timers_to_tensorboard log_loss_scale_to_tensorboard '
          'log_validation_ppl_to_tensorboard log_memory_to_tensorboard log_memory_interval '
          'log_device_memory_used log_num_zeros_in_grad log_max_attention_logit '
          'log_world_size_to_tensorboard log_energy wandb_project wandb_exp_name wandb_save_dir '
          'wandb_entity logging_level moe_per_layer_logging config_logger_dir '
          'dump_param_to_param_group_map enable_one_logger one_logger_project '
          'one_logger_run_name one_logger_async app_tag_run_name app_tag_run_version '
          'result_rejected_tracker_filename run_workload_inspector_server help'),
    group('profiling', 'A profiler that a failure cuts off is stopped.',
          'profile profile_step_start profile_step_end use_pytorch_profiler '
          'pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack '
          'pytorch_profiler_collect_chakra profile_ranks record_memory_history '
          'memory_snapshot_path record_shapes nvtx_ranges flight_recorder_dump_path '
          'flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout '
          'flight_recorder_include_stack_trace flight_recorder_include_only_active '
          'flight_recorder_extra_dump_on_exec'),
    group('host and launch', 'They say where and how a process runs.',
          'manual_gc manual_gc_interval manual_gc_eval empty_unused_memory_level '
          'train_sync_interval distributed_timeout_minutes distributed_timeout_seconds_after_init '
          'local_rank enable_msc num_dataset_builder_threads object_storage_cache_path '
          'data_cache_path mmap_bin_files dataloader_fast_cache_load '
          'dataloader_defer_npy_index_mmap per_dataset_sequences_path'),
    group('dense checkpoints', 'They say how dense checkpoints are written and read.',
          'save_retain_interval non_persistent_save_interval non_persistent_global_ckpt_dir '
          'exit_on_missing_checkpoint ckpt_format auto_detect_ckpt_format ckpt_fully_parallel_save '
          'ckpt_fully_parallel_load ckpt_fully_parallel_load_exchange_algo '
          'ckpt_fully_parallel_save_process_group ckpt_fully_parallel_load_process_group '
          'ckpt_assume_constant_structure ckpt_load_validate_sharding_integrity '
          'dist_ckpt_strictness dist_ckpt_save_pre_mcore_014 dist_ckpt_optim_fully_reshardable '
          'distrib_optim_fully_reshardable_mem_efficient verify_integrity stream_ckpt_dequant '
          'dist_ckpt_workers'),
    group('faults on purpose', 'They bring about what is recovered from.',
          'fault_injector_ranks fault_injector_num_ranks fault_injector_fault_types '
          'fault_injector_fault_probabilities fault_injector_fault_delay '
          'fault_injector_delay_start_iteration fault_injector_mtti_seconds '
          'fault_injector_offset_seconds fault_injector_seed'),
    group('inference', 'Training does not read them.',
          'inference_cuda_graph_scope flash_decode nccl_all_reduce_for_prefill '
          'inference_fuse_tp_communication inference_disable_triton_nvls_kernels '
          'inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels '
          'inference_moe_token_dispatcher_type mlp_chunks_for_prefill cache_mla_latents '
          'moe_pad_experts_for_cuda_graph_inference inference_batch_times_seqlen_threshold '
          'max_tokens_to_oom output_bert_embeddings bert_embedder_type use_legacy_static_engine '
          'inference_max_requests inference_max_seq_length inference_dynamic_batching '
          'inference_dynamic_batching_buffer_size_gb '
          'inference_dynamic_batching_paused_buffer_size_gb '
          'inference_dynamic_batching_mamba_memory_ratio inference_dynamic_batching_block_size '
          'inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens '
          'inference_dynamic_batching_num_cuda_graphs '
          'inference_dynamic_batching_track_paused_request_events '
          'inference_dynamic_batching_track_generated_token_events decode_only_cuda_graphs '
          'inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens '
          'inference_dynamic_batching_unified_memory_level enable_chunked_prefill '
          'num_speculative_tokens inference_dynamic_batching_enable_prefix_caching '
          'inference_dynamic_batching_prefix_caching_eviction_policy '
          'inference_dynamic_batching_prefix_caching_coordinator_policy '
          'inference_dynamic_batching_prefix_caching_routing_alpha '
          'inference_dynamic_batching_prefix_caching_mamba_gb '
          'inference_dynamic_batching_cuda_graph_mixed_prefill_count '
          'inference_dynamic_batching_cuda_graph_sizing_distribution '
          'inference_dynamic_batching_sampling_backend offset_sampling_seed_by_dp_rank '
          'inference_dynamic_batching_async_sched_mode inference_dynamic_batching_logprobs_mode '
          'inference_logging_step_interval inference_text_gen_server_logging '
          'inference_wandb_logging inference_coordinator_port '
          'mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype '
          'inference_use_synchronous_zmq_collectives inference_disable_ep_consensus '
          'inference_shards test_mode'),
    group('other programs', 'For other models or data; `pretrain_gpt.py` does not read them.',
          'decoder_num_layers bert_binary_head sample_rate mask_prob short_seq_prob ict_head_size '
          'biencoder_projection_dim biencoder_shared_query_context_model ict_load bert_load '
          'titles_data_path query_in_block_prob use_one_sent_docs evidence_data_path '
          'retriever_report_topk_accuracies retriever_score_scaling block_data_path '
          'embedding_path indexer_batch_size indexer_log_interval num_classes img_h img_w '
          'num_channels patch_dim classes_fraction data_per_class_fraction head_lr_mult '
          'sft_tokenizer_prompt_format onnx_safe openai_gelu check_for_spiky_loss'),
    group('earlier spellings',
          'Upstream refuses them, passes them over, or sets others, of which the list speaks.',
          'batch_size warmup model_parallel_size checkpoint_activations recompute_activations '
          'use_flash_attn deprecated_use_mcore_models enable_cuda_graph external_cuda_graph '
          'cuda_graph_scope_deprecated hybrid_override_pattern mtp_hybrid_override_pattern '
          'no_weight_decay_cond_type use_dist_ckpt_deprecated dist_ckpt_format_deprecated '
          'ckpt_fully_parallel_save_deprecated disable_msc_deprecated moe_enable_deepep '
          'rampup_batch_size'),
)  # fmt: skip
