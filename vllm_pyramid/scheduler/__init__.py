# SPDX-License-Identifier: Apache-2.0
"""Blocks per layer: spec, manager, lockstep coordinator and the scheduler over them.

request -> PyramidScheduler      stops a chunk at the prompt's end
        -> Admission             lets a prompt in if it will not be preempted too soon
        -> LockstepCoordinator   one counter a request, one allocation a crossing
        -> LayerKVCacheManager   the blocks of one layer
        -> vLLM's BlockPool
"""
