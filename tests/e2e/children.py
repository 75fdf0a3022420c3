# SPDX-License-Identifier: Apache-2.0
"""Running `child.py`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("child.py")


class Child:
    """An engine that was started in a process of its own.

    Args:
        folder: for its files. llm: arguments of `vllm.LLM`. waves: see `child.py`. triton: same.
        environment: variables beyond this process's own.
    """

    def __init__(
        self,
        folder: Path,
        llm: dict[str, Any],
        waves: Sequence[Any],
        triton: str | None = None,
        **environment: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        request, self._result = folder / "request.json", folder / "result.json"
        self._log = folder / "log.txt"
        defaults = {"enforce_eager": True, "skip_tokenizer_init": True, "seed": 0}
        request.write_text(
            json.dumps({"llm": {**defaults, **llm}, "waves": waves, "triton": triton})
        )
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(CHILD), str(request), str(self._result)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def result(self, seconds: float = 400) -> dict[str, Any]:
        """Wait for its end; what `child.run` returned."""
        status = self._process.wait(seconds)
        assert status == 0, self._log.read_text()[-6000:]
        result: dict[str, Any] = json.loads(self._result.read_text())
        return result

    def kill(self) -> None:
        """End it and what it started, if that still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def greedy(max_tokens: int, **extra_args: Any) -> dict[str, Any]:
    """Sampling parameters of exactly so many greedy tokens, as `child.py` takes them."""
    return {
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "detokenize": False,
        "extra_args": extra_args or None,
    }
