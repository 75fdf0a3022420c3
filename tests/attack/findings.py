# SPDX-License-Identifier: Apache-2.0
"""What a run of `fuzz` has found, and how it is told."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.attack.bodies import Attack


@dataclass
class Findings:
    """What a run has seen: answers by kind and status, and requests with a wrong answer."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[tuple[int, Attack, str]] = field(default_factory=list)
    by_reason: Counter[str] = field(default_factory=Counter)
    honest_seconds: list[float] = field(default_factory=list)
    idle_seconds: list[float] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    health: str = ""
    reconnected: int = 0
    of_vllm: Counter[str] = field(default_factory=Counter)

    @property
    def sent(self) -> int:
        return sum(counts.total() for counts in self.counts.values())

    def fail(self, number: int, attack: Attack, reason: str) -> None:
        self.by_reason[f"{attack.kind}: {reason[:90]}"] += 1
        self.failures.append((number, attack, reason))

    def good(self) -> bool:
        return not (self.failures or self.leaks or self.health)


def curl(url: str, attack: Attack, folder: Path, number: int) -> str:
    """The request as a command; a long body stands in a file."""
    headers = " ".join(
        shlex.quote(f"-H{name}: {value[:200]}") for name, value in attack.headers.items()
    )
    if len(attack.body) < 1500 and attack.body.isascii() and attack.body.decode().isprintable():
        data = shlex.quote(attack.body.decode())
    else:
        path = folder / f"request-{number}.bin"
        path.write_bytes(attack.body)
        data = f"@{path}"
    return f"curl -s {headers} --data-binary {data} {url}{attack.path}"


def report(findings: Findings, url: str, seed: int, folder: Path, log: str) -> str:
    """What a run has found, for people."""
    lines = [f"FUZZ_SEED={seed}: {findings.sent} requests in {findings.seconds:.0f} s"]
    for kind, counts in sorted(findings.counts.items()):
        lines.append(f"  {kind}: {', '.join(f'{k} {n}' for k, n in sorted(counts.items()))}")
    if times := sorted(findings.honest_seconds):
        middle, worst = times[len(times) // 2], times[-1]
        idle = sorted(findings.idle_seconds)[len(findings.idle_seconds) // 2]
        lines.append(f"honest seconds: idle {idle:.2f}, attacked {middle:.2f}, worst {worst:.2f}")
    sizes = [f"{name} {a} to {b}" for name, (a, b) in sorted(findings.memory.items())]
    lines.append(f"MiB resident: {', '.join(sizes)}")
    lines.append(f"connections that the server had closed meanwhile: {findings.reconnected}")
    lines += [f"vLLM's own fault, 500 {n} times: {what}" for what, n in findings.of_vllm.items()]
    errors = Counter(
        re.findall(r"^(?:\S.*?\) )?(?:ERROR [^\]]*\] )?(\w+Error: .{0,110})", log, re.M)
    )
    lines += [f"in the log, {n} times: {line}" for line, n in errors.most_common(12)]
    lines += [f"STILL HELD: {leak}" for leak in findings.leaks]
    lines += [f"SERVER: {findings.health}"] if findings.health else []
    lines += [f"FAILED {n} times: {reason}" for reason, n in findings.by_reason.most_common(40)]
    shown: Counter[str] = Counter()
    for number, attack, reason in findings.failures:
        shown[key := f"{attack.kind}{reason[:40]}"] += 1
        if shown[key] <= 3:
            lines.append(f"FUZZ_NUMBER={number} {attack.kind}: {reason}")
            lines.append(f"  {curl(url, attack, folder, number)}")
    lines.append("nothing was found" if findings.good() else "FAILED")
    return "\n".join(lines)


def settings_of(attack: Attack) -> str:
    """The settings of a request, as far as they fit into a line."""
    with contextlib.suppress(ValueError, AttributeError):
        xargs = json.loads(attack.body).get("vllm_xargs") or {}
        return ", ".join(f"{name[:30]}: {str(value)[:30]!r}" for name, value in xargs.items())
    return ""
