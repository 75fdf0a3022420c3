# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-pyramid show PROMPT`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vllm_pyramid.frontend.setting_values import parse_policy_args
from vllm_pyramid.policy import load_policy
from vllm_pyramid.tools.command_parts import Progress, check_writable, names, parse_engine_args


def add_command(commands: Any) -> None:
    """Add `vllm-pyramid show` to the commands."""
    parser = commands.add_parser(
        "show",
        help="draw what policies keep of a prompt, as one HTML file",
        description="Runs the prompt with each policy and writes one HTML file that needs nothing "
        "else: the prompt's text, shaded by how many layers and KV heads kept each token, the "
        "policies next to each other. The file holds the prompt and the answers.",
    )
    parser.add_argument("prompt", nargs="?", help="the text")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="the text, from a file")
    parser.add_argument("--model", help="folder or name (default: the built-in model)")
    parser.add_argument(
        "--policies",
        default="auto,streaming-llm",
        metavar="NAME,NAME",
        help="policies or .yaml files (default: auto,streaming-llm)",
    )
    parser.add_argument("--kv-budget", default="12%", help="tokens or per cent (default: 12%%)")
    parser.add_argument("--kv-policy-args", metavar="JSON", help="changes to every policy")
    parser.add_argument("--max-tokens", type=int, default=24, help="of the answer (default: 24)")
    parser.add_argument(
        "--traces", type=Path, metavar="DIR", help="keep the traces, in a folder for each policy"
    )
    parser.add_argument("--engine-args", metavar="JSON", help="further arguments of LLM")
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        default=Path("kept.html"),
        metavar="FILE",
        help="the file (default: kept.html)",
    )
    parser.set_defaults(run=_run)


def _prompt(args: argparse.Namespace) -> str:
    if (args.prompt is None) == (args.prompt_file is None):
        raise ValueError("give either the prompt's text or --prompt-file")
    if args.prompt is not None:
        text: str = args.prompt
    else:
        try:
            text = args.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the prompt {args.prompt_file}: {error}") from None
    if not text.strip():
        raise ValueError("the prompt is empty")
    return text


def _run(args: argparse.Namespace) -> int:
    prompt, chosen = _prompt(args), names(args.policies, "--policies")
    if args.max_tokens < 1:
        raise ValueError(f"--max-tokens {args.max_tokens}: at least 1")
    policy_args = parse_policy_args(args.kv_policy_args)
    engine_args = parse_engine_args(args.engine_args)
    for name in chosen:
        load_policy(name, _budget(name, args.kv_budget), policy_args)
    check_writable(args.output.parent, [args.output])
    traces: dict[str, str | None] = dict.fromkeys(chosen)
    if args.traces is not None:
        for name in chosen:
            check_writable(folder := args.traces / Path(name).stem, ())
            if any(folder.glob("*.npz")):
                raise ValueError(f"{folder} holds traces already: choose another folder")
            traces[name] = str(folder)
    from rich.console import Console

    from vllm_pyramid.tools.demo import model_path
    from vllm_pyramid.tools.eval.engine import ChildError, orderly_termination
    from vllm_pyramid.tools.show.engine import Task, show_policy
    from vllm_pyramid.tools.show.page import page

    model, shown = args.model or str(model_path()), []
    console = Console(highlight=False, soft_wrap=True)
    try:
        with orderly_termination(), Progress(console, len(chosen)) as progress:
            for name in chosen:
                task = Task(
                    model=model,
                    prompt=prompt,
                    policy=name,
                    budget=_budget(name, args.kv_budget),
                    policy_args=policy_args,
                    max_tokens=args.max_tokens,
                    engine_args=engine_args,
                    traces=traces[name],
                )
                shown.append(show_policy(task, progress.stage))
                progress.advance()
    except ChildError as error:
        raise ValueError(str(error)) from None
    args.output.write_text(
        page(shown, args.model or "the built-in model"), encoding="utf-8", newline="\n"
    )
    for one in shown:
        kept, tokens = one.report["kept_tokens"], one.report["prompt_tokens"]
        share = sum(kept) / (len(kept) * tokens)
        console.print(f"{one.policy}: {share:.1%} of {tokens:,} tokens kept, over all layers")
    console.print(f"written: {args.output}")
    return 0


def _budget(policy: str, budget: str) -> str | None:
    """Return the budget for a policy that has one."""
    return budget if load_policy(policy).has_budget else None
