# SPDX-License-Identifier: Apache-2.0
"""The generated tasks by name, in the order of the tables."""

from __future__ import annotations

import difflib

from lab.eval import chat_tasks, text_tasks
from lab.eval.task import Task

GENERATED: dict[str, type[Task]] = {
    task.name: task for task in (*text_tasks.TASKS, *chat_tasks.TASKS)
}


def load_task(name: str) -> Task:
    """Make the generated task of that name.

    Raises:
        ValueError: there is none; the message lists all.
    """
    if name not in GENERATED:
        close = difflib.get_close_matches(name, GENERATED, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown task {name!r}{hint}; there are: {', '.join(GENERATED)}")
    return GENERATED[name]()
