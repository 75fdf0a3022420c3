# SPDX-License-Identifier: Apache-2.0
"""Which requests start, how many of their tokens a step computes, and what is reported of them.

request -> PyramidScheduler      vLLM's scheduler, an adapter to a PolicyScheduler
        -> RequestPlanner        checks it, and plans what it keeps
        -> Chunks                ends a chunk at the next eviction
        -> Admission             starts a prompt if it will not be preempted too soon
        -> LockstepCoordinator   gives out and takes back the blocks of all layers (`kv_cache/`)
"""
