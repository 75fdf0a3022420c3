# SPDX-License-Identifier: Apache-2.0
"""`make soak`: lives of the scheduler's state machine until a million operations are done.

SOAK_OPERATIONS=1000000 SOAK_JOBS=2 make soak
SOAK_SEED=1234 SOAK_LIFE=77 make soak    # one life of an earlier run again
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import secrets
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tests.attack.lives import VARIANTS, Done, Life, draw_life, live, shrink

SECONDS_OF_SHRINKING = 120.0


@dataclass(frozen=True)
class Failed:
    """A life that failed, and the shortest one found that fails as it does."""

    number: int
    life: Life
    shortest: Life
    reason: str


def life_of(seed: int, number: int) -> Life:
    """The life of that number: variants take turns."""
    names = list(VARIANTS)
    return draw_life(f"{seed}/{number}", names[number % len(names)])


def soak(
    seed: int, operations: int, first: int = 0, step: int = 1, shrinking: float = 0.0
) -> tuple[Done, list[Failed]]:
    """Live the lives `first`, `first + step`, ... until `operations` are done."""
    done, failed = Done(), []
    for number in itertools.count(first, step):
        if done.total >= operations:
            break
        life = life_of(seed, number)
        try:
            live(life, done)
        except Exception:
            reason = "".join(traceback.format_exc(limit=-4))
            failed.append(Failed(number, life, shrink(life, shrinking), reason))
            if len(failed) == 3:
                break
    return done, failed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--life", type=int, default=None)
    arguments = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    print(f"SOAK_SEED={seed}", flush=True)
    start, done, failed = time.monotonic(), Done(), []
    if arguments.life is not None:
        done, failed = soak(seed, 1, first=arguments.life, shrinking=SECONDS_OF_SHRINKING)
    else:
        share = -(-arguments.operations // arguments.jobs)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as processes:
            runs = [
                processes.submit(soak, seed, share, first, arguments.jobs, SECONDS_OF_SHRINKING)
                for first in range(arguments.jobs)
            ]
            for run in runs:
                of_run, of_run_failed = run.result()
                done.lives += of_run.lives
                done.operations += of_run.operations
                done.seen += of_run.seen
                failed += of_run_failed
    seconds = time.monotonic() - start
    print(f"{done.total} operations in {done.lives} lives, {seconds:.0f} s", end="")
    print(f" ({done.total / seconds:.0f} a second)")
    for title, counts in (("operations", done.operations), ("what happened", done.seen)):
        print(f"{title}: {', '.join(f'{name} {int(n)}' for name, n in counts.most_common())}")
    for one in failed:
        print(f"\nFAILED: SOAK_SEED={seed} SOAK_LIFE={one.number} make soak\n{one.reason}")
        print(f"the same in fewer operations:\n{one.shortest}")
    print(f"{len(failed)} lives failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
