# SPDX-License-Identifier: Apache-2.0
"""A task of the study alone: instructions of a system prompt that no question has asked for yet."""

from __future__ import annotations

import json
import random
from typing import NamedTuple

from lab.eval.task import GeneratedTask, Sample
from vllm_pyramid.tools.eval.haystack import Tokens
from vllm_pyramid.tools.eval.phrases import make_names

_HEAD = "You are the assistant of a library. Follow these instructions in every conversation."
_TOOLS = (
    'You can call these tools. To call one, reply with its name alone: {"name": "..."}. '
    "The tools are:"
)
_USES = (
    ("returns the height of the tide at a harbor", "How high is the tide at Dover?"),
    ("translates a word into Latin", "Translate the word 'river' into Latin."),
    ("lists the books that a reader has borrowed", "Which books has reader 81 borrowed?"),
)
_EXPLAIN = "Explain in your own words what the text above says about this: {}"


class _Rule(NamedTuple):
    """An instruction, what a user says to whom it applies, and what the reply must be."""

    instruction: str
    said: str
    begin: str
    answer: str


def _rules(rng: random.Random) -> list[_Rule]:
    """Return three rules and a tool, with names that cannot be guessed; in a fixed order."""
    own, thanks, farewell, *tools = make_names(rng, 6, held_out=False)
    calls = [name.replace("-", "_") for name in tools]
    listed = [
        json.dumps({"name": call, "description": use})
        for call, (use, _) in zip(calls, _USES, strict=True)
    ]
    wanted = rng.randrange(len(calls))
    return [
        _Rule(
            f"When you are asked for your name, reply: My name is {own}.",
            "What is your name?",
            "My name is",
            own,
        ),
        _Rule(
            f"When you are thanked, reply: You are welcome, says the {thanks}.",
            "Thank you very much!",
            "You are welcome, says the",
            thanks,
        ),
        _Rule(
            f"When the user says goodbye, reply: Until we meet at the {farewell}.",
            "Goodbye!",
            "Until we meet at the",
            farewell,
        ),
        _Rule("\n".join([_TOOLS, *listed]), _USES[wanted][1], '{"name": "', calls[wanted]),
    ]


class Instructions(GeneratedTask):
    """Three rules and three tools in the system prompt, and a later turn to which one applies.

    The first turn is a long text and a question about it, at whose end the eviction comes. The
    second turn is one for which the system prompt has a rule, sample by sample another of the four
    (the last is a tool's call); its reply is begun, and right if it goes on as the rule says.
    """

    name = "instructions"
    needs_chat = True
    summary = "an instruction of the system prompt, applied in a chat's second turn"

    def sample(self, tokens: Tokens, length: int, index: int, rng: random.Random) -> Sample:
        """Return a chat; consecutive numbers apply different rules."""
        rules = _rules(rng)
        said, begin, answer = rules[index % len(rules)][1:]
        rng.shuffle(rules)
        system = "\n".join([_HEAD, *(rule.instruction for rule in rules)])
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": "\n\n" + _EXPLAIN.format(" word" * 24)},
        ]
        room = length - tokens.count(tokens.chat(messages)) - 8
        if room < 64:
            raise ValueError(f"{length} tokens leave no room for a text: ask for {length + 64}")
        sentences = tokens.passage(rng, room)
        about = rng.choice(sentences)
        question = _EXPLAIN.format(" ".join(about.split()[:12]))
        messages[1]["content"] = f"{' '.join(sentences)}\n\n{question}"
        prompt = tokens.chat(messages)
        whole = tokens.chat(
            [
                *messages,
                {"role": "assistant", "content": about},
                {"role": "user", "content": said},
            ]
        )
        if not whole.startswith(prompt):
            raise ValueError("this model's chat template changes what was said before")
        # A call goes on behind a quotation mark, names behind a space.
        spaced = 0 if begin.endswith('"') else 16
        return Sample(prompt, (answer,), spaced, lead=whole[len(prompt) :] + begin)
