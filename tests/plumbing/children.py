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

from tests.plumbing.prepared import popen

CHILD = Path(__file__).with_name("child.py")


class Child:
    """Engines that were started, one after the other, in a process of their own.

    Args:
        folder: for its files. engines: of each the arguments of `vllm.LLM` and the waves, see
            `child.py`. triton, graphs, kernels: same. environment: variables beyond its own.
    """

    def __init__(
        self,
        folder: Path,
        *engines: tuple[dict[str, Any], Sequence[Any]],
        triton: str | None = None,
        graphs: str | None = None,
        kernels: bool = False,
        **environment: str,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        request, self._result = folder / "request.json", folder / "result.json"
        self._log = folder / "log.txt"
        defaults = {"enforce_eager": True, "skip_tokenizer_init": True, "seed": 0}
        described = [{"llm": {**defaults, **llm}, "waves": waves} for llm, waves in engines]
        how = {"triton": triton, "graphs": graphs, "kernels": kernels}
        request.write_text(json.dumps({"engines": described, **how}))
        with self._log.open("w") as log:
            self._process = popen(
                [sys.executable, str(CHILD), str(request), str(self._result)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def results(self, seconds: float = 400) -> list[dict[str, Any]]:
        """Wait for its end; what `child.run` returned of each engine."""
        status = self._process.wait(seconds)
        assert status == 0, self._log.read_text()[-6000:]
        results: list[dict[str, Any]] = json.loads(self._result.read_text())
        return results

    def kill(self) -> None:
        """End it and what it started, if that still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def greedy(max_tokens: int, **extra_args: Any) -> dict[str, Any]:
    """Return parameters of exactly `max_tokens` greedy tokens, as `child.py` takes them."""
    return {
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "detokenize": False,
        "extra_args": extra_args or None,
    }
