# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.agents`: agents with tools, recorded or made up, against stock vLLM and policies.

Each agent is a loop of tool calls with a system prompt; some branch, in a pool for few of them.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from lab.agents.measure import NO_SESSIONS, by_turn, made_up, replays, turns_table
from lab.agents.recordings import Recording, read_recording
from lab.agents.replay import Turn
from vllm_pyramid.policy.request_keys import TURN_MODES, parse_turn_mode
from vllm_pyramid.tools.bench.command import run_with_folder
from vllm_pyramid.tools.bench.options import (
    AtLeastTwo,
    Names,
    Pools,
    Prefix,
    add_flags,
    parse,
)
from vllm_pyramid.tools.bench.prepare import BUILT_IN, model_of, with_job
from vllm_pyramid.tools.bench.processes import Engines
from vllm_pyramid.tools.bench.report import make_rows, records, write
from vllm_pyramid.tools.bench.shapes import SHAPES, Shape
from vllm_pyramid.tools.command_parts import Progress

# Options that a recording says itself, and those that only a recording has.
_MADE = {"prompt_len", "shared_len", "branches"}
_RECORDED = {"chat_template", "own_answers"}


class Agents(Prefix):
    """The options."""

    file: Path | None = Field(
        None,
        description="recorded sessions to replay, JSON lines (lab/agents/README.md); without it "
        "they are made up",
    )
    policies: Names = Field(
        ("stock-prefix-caching", "full"),
        description="names, .yaml files, `stock-prefix-caching`, and `stock-offloading` for vLLM "
        "with --kv-offloading-size (not on the CPU); the others are compared with the first",
    )
    prompt_len: PositiveInt = Field(350, description="tokens of a tool's result, in each turn")
    output_len: AtLeastTwo = Field(
        24, description="tokens of a tool call; of a recorded answer at most"
    )
    num_prompts: PositiveInt = Field(4, description="agents; of a recording the first ones (all)")
    turns: AtLeastTwo = Field(16, description="of an agent; of a recorded one at most (all)")
    concurrency: PositiveInt | None = Field(None, description="agents under way at once (all)")
    shared_len: Annotated[int, Field(ge=0)] = Field(
        2048, description="tokens of the system prompt and the tools, the same for all agents"
    )
    branches: PositiveInt = Field(
        2, description="ways in which each agent goes on after half of its turns"
    )
    pools: Annotated[Pools, Field(min_length=1)] = Field(
        (1.5,),
        validation_alias="pool_prompts",
        description="numbers of whole agents that the cache has room for without eviction",
    )
    host_cache: Annotated[NonNegativeFloat, Field(allow_inf_nan=False)] = Field(
        1.0, description="GiB of host memory: --kv-host-cache, and --kv-offloading-size; 0: none"
    )
    turn_modes: Names = Field(
        (),
        description="how sessions go on, with each policy that evicts (kv_turn_mode), or "
        f"`{NO_SESSIONS}` for requests without a session (of a recording all)",
    )
    chat_template: str | None = Field(
        None,
        description="of a recording: a file, or `chatml`, that replaces the model's own, which "
        "may know no tools; shapes and the built-in model have chatml",
    )
    own_answers: bool = Field(
        False,
        description="of a recording: prompts have the answers that the engine gave, not the "
        "recorded ones",
    )

    @model_validator(mode="after")
    def _check_recording(self) -> Agents:
        unused = _RECORDED if self.file is None else _MADE
        if given := sorted(self.model_fields_set & unused):
            flags = ", ".join(f"--{name}".replace("_", "-") for name in given)
            reason = "is for recorded sessions" if self.file is None else "does not go with a file"
            raise ValueError(f"{flags} {reason}: leave it out")
        if self.resume:
            raise ValueError("--resume: give --turn-modes resume")
        for mode in self.turn_modes:
            if mode != NO_SESSIONS:
                parse_turn_mode(mode, f"--turn-modes (which also takes `{NO_SESSIONS}`)")
        return self


def recording_of(options: Agents, file: Path, model: str, shape: Shape) -> Recording:
    """Return the recorded sessions of a file, as tokens of the model.

    ValueError: the file is wrong, the model has no chat template, or a prompt is too long.
    """
    of_others = options.model in SHAPES or options.model == BUILT_IN
    given = options.model_fields_set
    recording = read_recording(
        file,
        model,
        "chatml" if options.chat_template is None and of_others else options.chat_template,
        most_agents=options.num_prompts if "num_prompts" in given else None,
        most_turns=options.turns if "turns" in given else None,
        output_len=options.output_len,
        own_answers=options.own_answers,
    )
    if (tokens := recording.longest_prompt + options.output_len) > shape.positions:
        raise ValueError(
            f"{file}: the longest prompt has {recording.longest_prompt} tokens, {tokens} with "
            f"--output-len, and the model takes {shape.positions}: give --turns, or --num-prompts"
        )
    return recording


def run(options: Agents, folder: Path, console: Any) -> None:
    """Measure, write the results, and show them."""
    model, shape = model_of(options, folder)
    recording = None if options.file is None else recording_of(options, options.file, model, shape)
    changes, branches = dict[str, Any](), options.branches
    if recording is not None:
        changes = {"prompt_len": recording.longest_prompt, "num_prompts": len(recording.agents)}
        changes |= {"turns": recording.turns, "shared_len": 0}
        branches = recording.branches
    requests = changes.get("num_prompts", options.num_prompts) * branches
    changes["engine_args"] = {"max_num_seqs": requests, **options.engine_args}
    modes = options.turn_modes or (TURN_MODES if recording else (None,))
    prepared = with_job(options, model, shape, modes, **changes)

    def agents_of(number: int) -> list[list[Turn]]:
        return recording.agents if recording else made_up(prepared.job, number, branches)

    total = len(prepared.variants) * prepared.job.num_prompts * len(options.rounds)
    with (
        Progress(console, total) as progress,
        Engines(
            prepared, share=True, on_stage=progress.stage, module="lab.agents.replay"
        ) as engines,
    ):
        samples = replays(
            prepared,
            engines,
            options.rounds,
            progress,
            agents_of,
            recording.ends if recording else (),
            own_answers=recording is None or recording.own_answers,
        )
    turns = by_turn(samples)
    turns.to_csv(options.out / "agents-by-turn.csv", index=False)
    print(turns_table(turns), end="\n\n")
    about = {
        "threads": prepared.threads,
        "baseline": prepared.variants[0].label,
        "command": shlex.join(["python", "-m", "lab.agents", *sys.argv[1:]]),
        "by_turn": records(turns),
    }
    write("agents", options, make_rows("agents", prepared.job, prepared.variants, samples), about)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0 on success, 2 on wrong input, which one line explains."""
    parser = argparse.ArgumentParser(prog="python -m lab.agents", description=__doc__)
    add_flags(parser, Agents)
    try:
        options = parse(Agents, vars(parser.parse_args(argv)))
        return run_with_folder(options, partial(run, options))
    except ValueError as error:
        print(f"lab.agents: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
