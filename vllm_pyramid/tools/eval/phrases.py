# SPDX-License-Identifier: Apache-2.0
"""The wording of made-up facts: names and numbers, sentences that join them, and questions.

A question ends with the beginning of its answer, as in RULER (https://arxiv.org/abs/2404.06654):
the model continues with the words that are scored. The built-in model was trained on the same
wording with other names and numbers. A checksum of the word itself decides which are held out from
training, so training and evaluation agree without sharing a list.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass

DIGITS = 5

_ADJECTIVES = """
    able amber ancient autumn blue bold brave bright bronze calm careful clever cold copper crimson
    curious deep distant dusty eager early easy electric empty faint famous fancy fast final flat
    fresh frozen gentle giant glad golden grand gray green happy hidden hollow honest humble hungry
    icy idle inner jolly keen kind large late lazy light little lone long loud lucky magic major
    merry mild misty modern narrow new noble northern odd old open orange pale patient plain polite
    proud purple quick quiet rapid rare red ripe rough round royal rusty sandy secret sharp shiny
    short shy silent silver simple slow small smooth soft solid southern spare stable steady still
    stormy strange strong sudden sunny sweet swift tall tame thin tidy tiny tough true urban vast
    velvet violet warm western white wide wild windy winter wise wooden yellow young
""".split()  # noqa: SIM905  a list of words, not of quotes
_NOUNS = """
    anchor apple arrow badge bakery barrel basket beacon bell bicycle blanket boat bottle branch
    bridge broom bucket butter button cabin camera candle canyon carpet castle chair cherry circle
    clock cloud coast comet compass cotton crane creek crown curtain desert diamond dolphin door
    dragon drum eagle engine falcon feather ferry field finger flag flame flower flute forest
    fountain fox galaxy garden gate giraffe glacier glove grape hammer harbor harp hat hawk hill
    honey horse island jacket jungle kettle key kitchen kite ladder lake lamp lantern leaf lemon
    letter lion lizard machine magnet maple marble market meadow melon mirror monkey moon mountain
    needle nest oak ocean olive onion orchard otter owl paddle palace panda paper parrot pearl
    pencil pepper piano pigeon pillow pine planet plum pocket pond poppy potato prairie pumpkin
    puzzle rabbit rain raven ribbon ring river robin rocket rope rose sail salmon scarf school
    shadow shell ship shovel signal snow spider spoon spring squirrel stone storm street summit sun
    swan table teacher temple thunder ticket tiger tower town train tree trumpet tulip tunnel turtle
    umbrella valley village violin wagon walnut water whale wheel whistle willow window wing wolf
""".split()  # noqa: SIM905  a list of words, not of quotes


def is_held_out(word: str) -> bool:
    """Return whether a name or number is kept from training: one in five is."""
    return zlib.crc32(word.lower().encode()) % 5 == 0


def make_name(rng: random.Random, *, held_out: bool) -> str:
    """Return two words such as `quiet-harbor`, a pair from one side of the split."""
    while True:
        name = f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"
        if is_held_out(name) == held_out:
            return name


def make_number(rng: random.Random, *, held_out: bool) -> str:
    """Return a number of `DIGITS` digits without a leading zero, from one side of the split."""
    while True:
        number = str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        if is_held_out(number) == held_out:
            return number


def make_names(rng: random.Random, count: int, *, held_out: bool) -> list[str]:
    """Return `count` different names."""
    return _different(make_name, rng, count, held_out)


def make_numbers(rng: random.Random, count: int, *, held_out: bool) -> list[str]:
    """Return `count` different numbers."""
    return _different(make_number, rng, count, held_out)


def _different(make: Callable[..., str], rng: random.Random, count: int, held: bool) -> list[str]:
    made: dict[str, None] = {}
    while len(made) < count:
        made[make(rng, held_out=held)] = None
    return list(made)


@dataclass(frozen=True)
class Question:
    """What is asked, and the beginning of the answer that is given to the model."""

    ask: str
    begin: str

    @property
    def prompt(self) -> str:
        """The text that follows the document; the answer follows it with a space."""
        return f"\n\nQuestion: {self.ask}\nAnswer: {self.begin}"


@dataclass(frozen=True)
class FactPhrase:
    """A fact that gives a name its number; `{key}` and `{value}` are filled in."""

    fact: str
    ask: str
    begin: str

    def state(self, key: str, value: str) -> str:
        return self.fact.format(key=key, value=value)

    def question(self, key: str) -> Question:
        return Question(self.ask.format(key=key), self.begin.format(key=key))


CODE = FactPhrase(
    "The secret code of {key} is {value}.",
    "What is the secret code of {key}?",
    "The secret code of {key} is",
)


def held_out_facts(rng: random.Random, count: int) -> tuple[list[str], list[str], list[str]]:
    """Return `count` names and numbers that training has not seen, and a fact of each pair."""
    keys = make_names(rng, count, held_out=True)
    values = make_numbers(rng, count, held_out=True)
    return keys, values, list(map(CODE.state, keys, values))


def begins_with(text: str, answer: str) -> bool:
    """Return whether the answer stands at the beginning, as a word of its own."""
    text = text.lstrip()
    after = text[len(answer) : len(answer) + 1]
    return text.startswith(answer) and not after.isalnum()
