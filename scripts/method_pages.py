# SPDX-License-Identifier: Apache-2.0
"""Write docs/methods/: a page for each preset, and for each kind that no preset has.

A page has the preset's text and parameters, and the docstrings of its parts and of their modules.
`make docs` writes the pages; `make lint` fails where they are not what the code says (`--check`).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_pyramid.policy.component import Component
from vllm_pyramid.policy.kinds import METHODS, built_in_kinds
from vllm_pyramid.policy.policy import SECTIONS, Policy
from vllm_pyramid.policy.presets import RECOMMENDED, load_presets

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "methods"
HEAD = "<!-- Written by scripts/method_pages.py from the docstrings and configs/. -->\n"
# Parts of a preset that decide nothing: they are on no page.
SILENT = {"none", "uniform", "top_k", "prompt_end", "device", "points", "all", "alike"}
# Modules of a method that are about its use, beside that of its class.
MORE = {"decay": ("engine",), "thin_generated": ("generated",), "global": ("scheduler",)}

# Presets whose pages have the texts that others refer to.
FIRST = {RECOMMENDED, "h2o", "keydiff", "select", "snapkv", "streaming-llm"}
# Fields that are no settings.
INTERNAL = {"kind", "ranks"}

_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
_PAGE = re.compile(r"(?<![\w/])(docs|lab)/([\w/-]+\.md)(#[\w-]+)?")
_ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.*)")


def linked(text: str) -> str:
    """Return prose with links to papers and to the project's pages."""

    def page(found: re.Match[str]) -> str:
        folder, name, place = found.groups()
        target = f"../{name}" if folder == "docs" else f"../../lab/{name}"
        return f"[{name.rsplit('/', 1)[-1]}]({target}{place or ''})"

    return _PAGE.sub(page, _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text))


def prose(docstring: str) -> str:
    """Return a docstring as Markdown; what is indented in it stays a block of code."""
    lines = inspect.cleandoc(docstring).splitlines()
    return "\n".join(line if line.startswith("    ") else linked(line) for line in lines)


def described(cls: type[Component]) -> tuple[str, dict[str, str]]:
    """Return a class's docstring without its attributes, and what it says of each of them."""
    text, _, attributes = inspect.cleandoc(cls.__doc__ or "").partition("\n\nAttributes:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in attributes.partition("\n\n")[0].splitlines():
        if entry := _ENTRY.fullmatch(line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    for base in cls.__bases__:
        if issubclass(base, Component) and base is not Component:
            found = described(base)[1] | found
    return text, found


def parts_of(policy: Policy) -> Iterator[tuple[str, Component]]:
    """Yield the parts of a policy that decide something, those within others too."""
    waiting = [(section, getattr(policy, section)) for section in SECTIONS]
    while waiting:
        section, part = waiting.pop(0)
        inner = [(f"{section}.{name}", getattr(part, name)) for name in type(part).model_fields]
        if part.kind not in SILENT or part != type(part)():
            yield section, part
            waiting[:0] = [(name, value) for name, value in inner if isinstance(value, Component)]


def argument(policy: Policy | None, section: str, name: str) -> str:
    """Return how `--kv-policy-args` names a field."""
    if policy is None or "." in section:
        return f"{section}.{name}"
    fields = [name for name in type(policy).model_fields if name not in SECTIONS]
    for other in SECTIONS:
        fields += type(getattr(policy, other)).model_fields
    return name if fields.count(name) == 1 and name not in SECTIONS else f"{section}.{name}"


def written(raw: object) -> str:
    """Return a field's value as a preset writes it."""
    raw = raw["kind"] if isinstance(raw, dict) and "kind" in raw else raw
    return raw if isinstance(raw, str) else json.dumps(raw)


def section_of(
    section: str,
    cls: type[Component],
    part: Component | None,
    policy: Policy | None,
    homes: dict[object, str],
) -> str:
    """Return what a page says of one part: its class, its parameters, its module.

    Args:
        part: the preset's part, whose values are shown; None: the defaults are.
        homes: the pages that have the texts of classes and modules; filled by the first that does.
    """
    kind = cls.model_fields["kind"].default
    own = policy.name if policy else kind
    text, meanings = described(cls)
    if (home := homes.setdefault(cls, own)) != own:
        text = f"{text.partition(chr(10) * 2)[0]} [More]({home}.md)."
    rows = []
    for name, field in cls.model_fields.items():
        if name in INTERNAL:
            continue
        default = "" if field.is_required() else field.get_default(call_default_factory=True)
        given = written(part.model_dump(mode="json")[name] if part else default)
        meaning = re.sub(r"\bNone\b", "null", linked(meanings[name]).replace("|", "\\|"))
        rows.append(f"| `{argument(policy, section, name)}` | {given} | {meaning} |")
    found = [f"## `{section}`: `{kind}`", prose(text)]
    if rows:
        title = "Here" if part else "Default"
        found.append("\n".join([f"| Argument | {title} | Meaning |", "|---|---|---|", *rows]))
    if cls.__module__.startswith(METHODS):
        file = Path(inspect.getfile(cls))
        for module in (file, *(file.with_name(f"{name}.py") for name in MORE.get(kind, ()))):
            if module not in homes:
                homes[module] = own
                tree = ast.parse(module.read_text(encoding="utf-8"))
                found.append(prose(ast.get_docstring(tree) or ""))
            elif homes[module] not in (own, home):
                found.append(f"[More]({homes[module]}.md).")
    return "\n\n".join(found)


def page(policy: Policy, homes: dict[object, str]) -> str:
    """Return the page of a preset."""
    called = " This is `--kv-policy auto`." if policy.name == RECOMMENDED else ""
    paper = re.sub(r"(https://\S+?)(?=[,\s]|$)", r"<\1>", policy.paper)
    facts = [
        f"`vllm serve MODEL --kv-policy {policy.name}`",
        f"budget `{policy.budget}`, window {policy.window}, sinks {policy.sinks}",
    ]
    found = [f"{HEAD}\n# {policy.name}", f"{policy.description.rstrip('.')}.{called}"]
    found += [f"Paper: {paper}."] if paper else []
    found.append("; ".join(facts) + ". [All policies](../policies.md).")
    for section, part in parts_of(policy):
        found.append(section_of(section, type(part), part, policy, homes))
    return "\n\n".join(found) + "\n"


def pages() -> dict[str, str]:
    """Return all pages by the names of their files."""
    homes: dict[object, str] = {}
    presets = sorted(load_presets(), key=lambda p: (p.name not in FIRST, p.name))
    found = {f"{policy.name}.md": page(policy, homes) for policy in presets}
    used = {type(part) for policy in presets for _, part in parts_of(policy)}
    for section, base in SECTIONS.items():
        for kind, cls in built_in_kinds(base).items():
            if cls not in used and kind not in SILENT and f"{kind}.md" not in found:
                text = section_of(section, cls, None, None, homes)
                about = "No preset has it. [All policies](../policies.md)."
                found[f"{kind}.md"] = f"{HEAD}\n# {kind}\n\n{about}\n\n{text}\n"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it would")
    check = parser.parse_args().check
    wanted = pages()
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    stale = sorted(name for name in {*wanted, *there} if wanted.get(name) != there.get(name))
    if check:
        for name in stale:
            print(f"docs/methods/{name}: run scripts/method_pages.py", file=sys.stderr)
        return int(bool(stale))
    FOLDER.mkdir(exist_ok=True)
    for name in stale:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
