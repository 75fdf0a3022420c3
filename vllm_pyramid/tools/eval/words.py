# SPDX-License-Identifier: Apache-2.0
"""Names and numbers for generated tasks, split in two: seen in training, and held out.

The split is by a checksum of the word itself, so the built-in model's training and the bench agree
on it without sharing a list: nothing that the bench asks for was ever an answer in training.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator

__all__ = [
    "DIGITS",
    "is_held_out",
    "make_name",
    "make_names",
    "make_number",
    "make_numbers",
    "name_words",
]

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
    """Whether a name or number is kept from training: one in five."""
    return zlib.crc32(word.lower().encode()) % 5 == 0


def name_words() -> Iterator[tuple[str, str]]:
    """Every adjective and every noun at least once, in pairs: for a tokenizer's training."""
    count = max(len(_ADJECTIVES), len(_NOUNS))
    for i in range(count):
        yield _ADJECTIVES[i % len(_ADJECTIVES)], _NOUNS[i % len(_NOUNS)]


def make_name(rng: random.Random, *, held_out: bool) -> str:
    """Two words such as `quiet-harbor`, a pair from one side of the split."""
    while True:
        name = f"{rng.choice(_ADJECTIVES)}-{rng.choice(_NOUNS)}"
        if is_held_out(name) == held_out:
            return name


def make_number(rng: random.Random, *, held_out: bool) -> str:
    """A number of `DIGITS` digits without a leading zero, from one side of the split."""
    while True:
        number = str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        if is_held_out(number) == held_out:
            return number


def make_names(rng: random.Random, count: int, *, held_out: bool) -> list[str]:
    """`count` different names."""
    return _different(lambda: make_name(rng, held_out=held_out), count)


def make_numbers(rng: random.Random, count: int, *, held_out: bool) -> list[str]:
    """`count` different numbers."""
    return _different(lambda: make_number(rng, held_out=held_out), count)


def _different(make: Callable[[], str], count: int) -> list[str]:
    made: dict[str, None] = {}
    while len(made) < count:
        made[make()] = None
    return list(made)
