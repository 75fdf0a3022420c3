# SPDX-License-Identifier: Apache-2.0
"""Parts of the commands of `vllm-pyramid`: lists on the command line, files, progress bars."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Arguments of an engine that no command leaves to `--engine-args`.
_OWN_FLAGS = {
    *("model", "kv_policy", "kv_budget", "kv_min_tokens", "kv_policy_args", "kv_evict"),
    *("kv_trace", "kv_swap_space"),
}


def names(text: str, what: str) -> tuple[str, ...]:
    """Return the parts of a list such as `full,snapkv`, each once; ValueError if it is empty."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise ValueError(f"{what} is empty: give at least one, separated by commas")
    return found


def numbers(text: str, what: str, least: int) -> tuple[int, ...]:
    """Return the numbers of a list such as `1024,4096`, each at least `least`; else ValueError."""
    found = names(text, what)
    for name in found:
        if not name.isascii() or not name.isdigit() or int(name) < least:
            raise ValueError(f"{what}: {name!r} is not a whole number of at least {least}")
    return tuple(map(int, found))


def parse_engine_args(text: str | None) -> dict[str, Any]:
    """Parse `--engine-args` of our commands: further arguments of `LLM`, as a JSON object.

    ValueError: malformed JSON, not an object, or an argument that the command sets itself.
    """
    try:
        values = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--engine-args is not valid JSON: {error.msg} in {text!r}") from None
    if not isinstance(values, dict):
        raise ValueError('--engine-args must be a JSON object such as {"dtype": "bfloat16"}')
    if taken := values.keys() & _OWN_FLAGS:
        raise ValueError(
            f"--engine-args: leave {', '.join(sorted(taken))} out, which has its own flag"
        )
    return values


def split_cache_dtype(policy: str) -> tuple[str, str | None]:
    """Split `snapkv@fp8` into the policy and the type of its KV cache; None for the model's own.

    ValueError: the cache cannot have that type.
    """
    name, at, dtype = policy.rpartition("@")
    if not at:
        return policy, None
    from vllm_pyramid.compat.backend_names import FP8_CACHES, SCALED_ROWS

    if dtype not in (types := (*FP8_CACHES, *SCALED_ROWS)):
        raise ValueError(
            f"{policy!r}: behind the @ goes a type of KV cache, one of {', '.join(types)}"
        )
    return name, dtype


def check_writable(folder: Path, paths: Iterable[Path | None]) -> None:
    """Raise ValueError before a long run if results cannot be written. No empty file stays."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            if path is not None:
                is_new = not path.exists()
                path.open("a").close()
                if is_new:
                    path.unlink()
    except OSError as error:
        raise ValueError(f"cannot write {error.filename}: {error.strerror}") from error


class Progress:
    """A progress bar that shows what is being done, how many of `total` are done, and the times."""

    def __init__(self, console: Any, total: int) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=30),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        """Show what is being done."""
        self._bar.update(self._task, description=text)

    def advance(self, count: int = 1) -> None:
        """Count `count` more as done."""
        self._bar.advance(self._task, count)
