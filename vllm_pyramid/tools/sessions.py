# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-pyramid sessions URL`: list what a server remembers, and forget it."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from typing import Any

_PATH = "/pyramid/sessions"
_TIMEOUT_S = 30.0


def add_command(commands: Any) -> None:
    """Add `vllm-pyramid sessions` to the commands."""
    parser = commands.add_parser(
        "sessions",
        help="list or forget the sessions (kv_session) that a server remembers",
        description="Lists the sessions of a server that was started with --kv-page: names, turns, "
        "tokens up to the latest turn, and when they expire. Tenants are those who share a "
        "cache_salt, under a name that does not tell it.",
    )
    parser.add_argument("url", metavar="URL", help="such as http://localhost:8000")
    parser.add_argument("--forget", action="store_true", help="forget them: all, or those named")
    parser.add_argument("--session", metavar="NAME", help="only sessions of this name")
    parser.add_argument("--tenant", metavar="ID", help="only sessions of this tenant, as listed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--api-key", metavar="KEY", help="of the server (default: the variable VLLM_API_KEY)"
    )
    parser.set_defaults(run=_run)


def _ask(method: str, url: str, key: str | None) -> Any:
    """Return a server's answer; ValueError with the reason if it does not answer, or refuses."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no URL of a server, such as http://localhost:8000")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        try:
            reason = json.loads(error.read())["error"]
        except (ValueError, KeyError, TypeError):
            reason = "it has no such list: start the server with --kv-page"
        raise ValueError(f"the server answers {error.code}: {reason}") from None
    except (OSError, ValueError, HTTPException) as error:
        raise ValueError(f"{url} does not answer: {error}") from None


def _run(args: argparse.Namespace) -> int:
    url = args.url.rstrip("/") + _PATH
    key = args.api_key or os.environ.get("VLLM_API_KEY")
    named = {"session": args.session, "tenant": args.tenant}
    named = {name: value for name, value in named.items() if value is not None}
    if args.forget:
        answer = _ask("DELETE", f"{url}?{urllib.parse.urlencode(named)}", key)
        print(json.dumps(answer) if args.json else f"forgotten: {answer['forgotten']}")
        return 0 if answer["forgotten"] else 1
    rows = [
        row
        for row in _ask("GET", url, key)["sessions"]
        if all(row[name] == value for name, value in named.items())
    ]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(rows)} sessions")
    for column in ("session", "tenant", "turns", "tokens", "idle, s", "expires in, s"):
        table.add_column(column, justify="left" if column in ("session", "tenant") else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console(highlight=False, markup=False).print(table)
    return 0
