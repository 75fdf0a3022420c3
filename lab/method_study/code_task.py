# SPDX-License-Identifier: Apache-2.0
"""Tasks of the study alone: go on with source code, of Python's own library or of this project."""

from __future__ import annotations

import random
import re
import sysconfig
import zlib
from functools import cache
from pathlib import Path

import vllm_pyramid
from lab.eval.task import GeneratedTask, Sample, seed_of
from vllm_pyramid.tools.eval.haystack import Tokens

_CONTINUATION = 48  # tokens
_SPACE = re.compile(r"(?<=\S) (?=\S)")  # between words of a line: where a prompt may end


@cache
def _modules() -> list[str]:
    """Return the sources of the standard library's modules, by their names."""
    found = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [path.read_text(encoding="utf-8") for path in found]


@cache
def _files() -> list[str]:
    """Return the sources of this project's package, each behind a line with its path."""
    folder = Path(vllm_pyramid.__file__).parent
    found = sorted((path.relative_to(folder.parent), path) for path in folder.rglob("*.py"))
    return [f"# {name.as_posix()}\n{path.read_text(encoding='utf-8')}" for name, path in found]


def sources_of_this_project() -> str:
    """Return a short name of the version of this project's files that `repository` is made of."""
    return f"{zlib.crc32(''.join(_files()).encode()):08x}"


class Code(GeneratedTask):
    """A module's source up to a place in the middle of a line; what follows is given."""

    name = "code"
    summary = "source code of Python's library, continued"
    metric = "perplexity"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        """Return the beginning of a module; consecutive numbers have different modules."""
        # Four characters a token and more in code: what is too short is seen without a tokenizer.
        long = [text for text in _modules() if len(text) > 5 * length]
        random.Random(seed_of(self.name, length)).shuffle(long)
        for turn in range(len(long)):
            text = long[(index + turn) % len(long)]
            found = self._cut(tokens, text, round(length * rng.uniform(0.95, 1.0)))
            if found is not None:
                return found
        raise ValueError(f"no module of Python's library has {length} tokens and more")

    def _cut(self, tokens: Tokens, text: str, length: int) -> Sample | None:
        """Return a module's first `length` tokens, or a little less; None if it is too short."""
        text = text[: 8 * length]
        if tokens.count(text) < length + 2 * _CONTINUATION:
            return None
        end = len(tokens.first(text, length))
        for place in reversed([match.start() for match in _SPACE.finditer(text, 0, end)][-40:]):
            prompt, behind = text[:place], text[place : place + 8 * _CONTINUATION]
            ids = tokens.encode(prompt)
            both = tokens.encode(prompt + behind)
            if both[: len(ids)] != ids:
                continue
            if len(both) < len(ids) + _CONTINUATION:
                return None
            answer = tokens.first(prompt + behind, len(ids) + _CONTINUATION)[place:]
            return Sample(prompt, (answer,), 0)
        return None


class Repository(Code):
    """Files of this project, one behind the other in an order of each sample's own.

    The last of them ends in the middle of a line, and what follows is given. The prompts are those
    of a version of this project.
    """

    name = "repository"
    summary = "source files of this project, the last of them continued"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        """Return files of about `length` tokens."""
        files = rng.sample(_files(), len(_files()))
        found = self._cut(tokens, "\n\n".join(files), length)
        if found is None:
            raise ValueError(
                f"this project's sources have fewer than {length} tokens, or no place to cut them"
            )
        return found
