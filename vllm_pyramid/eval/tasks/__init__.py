# SPDX-License-Identifier: Apache-2.0
"""The generated tasks, by name; a class is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module

from vllm_pyramid.eval.task import Task
from vllm_pyramid.policy.component import did_you_mean

__all__ = ["GENERATED", "load_task"]

# Name: module and class. The order is that of tables.
GENERATED = {
    "needle": ("retrieval", "Needle"),
    "multi-key": ("retrieval", "MultiKey"),
    "multi-value": ("retrieval", "MultiValue"),
    "two-questions": ("retrieval", "TwoQuestions"),
    "variable-tracing": ("structure", "VariableTracing"),
    "key-value": ("structure", "KeyValue"),
    "few-shot": ("structure", "FewShot"),
    "perplexity": ("perplexity", "Perplexity"),
    "attention-recall": ("recall", "AttentionRecall"),
}


def load_task(name: str) -> Task:
    """The generated task of that name.

    Raises:
        ValueError: there is none; the message lists all.
    """
    if name not in GENERATED:
        hint = did_you_mean(name, tuple(GENERATED))
        raise ValueError(f"unknown task {name!r}{hint}; there are: {', '.join(GENERATED)}")
    module, cls = GENERATED[name]
    task: Task = getattr(import_module(f"{__name__}.{module}"), cls)()
    return task
