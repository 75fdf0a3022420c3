# SPDX-License-Identifier: Apache-2.0
"""Tasks by name: the study's own, and those of `lab.eval`."""

from __future__ import annotations

from code_task import Code, Repository
from instruction_task import Instructions

from lab.eval.registry import load_task as load_packaged
from lab.eval.task import GeneratedTask, Task

OWN: dict[str, type[GeneratedTask]] = {task.name: task for task in (Code, Repository, Instructions)}


def load_task(name: str) -> Task:
    """Return the task of that name.

    Raises:
        ValueError: there is none.
    """
    return OWN[name]() if name in OWN else load_packaged(name)
