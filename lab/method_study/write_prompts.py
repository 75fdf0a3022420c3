#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write prompts of the study's tasks as JSON Lines, as `vllm-pyramid calibrate` reads them.

    .venv/bin/python lab/method_study/write_prompts.py --out prompts.jsonl --seed 39

Take a seed that the tables do not have: what is measured must not be what was calibrated on.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for `lab`
from own_tasks import load_task

from lab.eval.task import GeneratedTask
from lab.models.folders import model_folder
from vllm_pyramid.tools.eval.haystack import load_tokens

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)


@app.command()
def write(
    out: Annotated[Path, typer.Option(help="the file")],
    seed: Annotated[int, typer.Option(help="of the prompts")],
    model: Annotated[str, typer.Option(help="as in tables.py")] = "smollm2",
    tasks: Annotated[str, typer.Option()] = "code,explain,few-shot,needle",
    length: Annotated[int, typer.Option(help="tokens of a prompt")] = 4000,
    samples: Annotated[int, typer.Option(help="prompts of each task")] = 2,
) -> None:
    """Write one line for each prompt."""
    tokens = load_tokens(model_folder(model))
    lines = []
    for name in tasks.split(","):
        task = load_task(name)
        assert isinstance(task, GeneratedTask), name
        for index in range(samples):
            prompt = task.numbered(tokens, length, index, seed).prompt
            lines.append(json.dumps({"prompt_token_ids": tokens.encode(prompt)}))
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
