# SPDX-License-Identifier: Apache-2.0
"""The worker's side of a policy.

cpu_worker, gpu_worker  vLLM's workers, whose model runner is extended (`extend`)
adapter_v1, adapter_v2  precede the class of a model runner, and call vLLM's methods and the runtime
runtime                 what a worker does for its policy, at start-up and in each step
worker_layers           the layers that evict, and the KV cache specs of all layers
layer_binding           gives attention and metadata builders of those layers their contexts
step_tables             the block tables that vLLM fills and attention reads
memory                  device memory that the policy needs in addition to the cache
eviction_tracker        requests and their plans: the skips and evictions of a step
pipeline_sync, ranks    the other workers
block_copies            copies of blocks before a step
copy_stream             host memory that the device addresses, and a stream for copies
warm_up                 compiles the kernels of evictions before the first request

A step: EvictionTracker (each request's plan) -> Step (skips of all layers, evictions) -> metadata
of each layer -> attention -> eviction in each layer -> report to the scheduler, and trace.
"""
