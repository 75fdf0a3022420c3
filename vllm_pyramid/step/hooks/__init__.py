# SPDX-License-Identifier: Apache-2.0
"""The hooks of methods that do more than score at an eviction.

A part of a policy returns one object from `Component.worker_hooks`. Its class derives from those of
the four protocols whose functions it needs, and overrides these functions; every other one does
nothing. In a worker they are called in this order:

    start-up     CacheHooks     limit_cache  allocate  value_cache  compile_kernels
    a step       StepHooks      without_graphs  begin_step                             end_step
    each layer   LayerHooks       after_write  before_attention  attend  after_attention
                 EvictionHooks      score  before_compact  after_compact  after_eviction
                                    wants_scores  take_scores
    last layer   EvictionHooks        (deferred evictions) evidence  decide

and `SchedulerHooks` in the scheduler. A step is one call of the model, with tokens of several
requests. `MethodHooks` sorts the hooks of all methods once, at start-up, by the functions that they
override.
"""

from vllm_pyramid.step.hooks.context import CopyStream, HostMemory, LayerSpec, WorkerContext
from vllm_pyramid.step.hooks.methods import LAYER_HOOKS, MethodHooks
from vllm_pyramid.step.hooks.scheduler import SchedulerHooks
from vllm_pyramid.step.hooks.worker import (
    CacheHooks,
    EvictionHooks,
    LayerHooks,
    StepHooks,
    StepNeeds,
    WorkerHooks,
)

__all__ = [
    "LAYER_HOOKS",
    "CacheHooks",
    "CopyStream",
    "EvictionHooks",
    "HostMemory",
    "LayerHooks",
    "LayerSpec",
    "MethodHooks",
    "SchedulerHooks",
    "StepHooks",
    "StepNeeds",
    "WorkerContext",
    "WorkerHooks",
]
