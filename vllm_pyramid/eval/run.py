# SPDX-License-Identifier: Apache-2.0
"""Runs tasks over policies and budgets: makes the samples, fills engines, keeps what came back.

Every result is appended to a file as soon as it is there, under a key that names the model, the
policy's definition, the budget and the prompt. A later run takes from it what it needs: that is how
an interrupted run goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_pyramid.child_process import run_child
from vllm_pyramid.eval.engine import Request, Work
from vllm_pyramid.eval.haystack import Tokens
from vllm_pyramid.eval.task import Result, Sample, Task
from vllm_pyramid.eval.variants import Variant
from vllm_pyramid.model_shape import longest_of_model
from vllm_pyramid.policy import Policy
from vllm_pyramid.store import Store as ResultsFile
from vllm_pyramid.store import identity_of_model, key_of

__all__ = ["Answer", "Run", "Settings", "Store"]

Stage = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """What is to be measured.

    Attributes:
        model: folder or Hugging Face name. policies: each with arguments of its own.
        budgets: for each policy that evicts. tasks: in the order of the tables.
        lengths: of the prompts, in tokens. samples: of each task, length and seed.
        seeds: every one makes samples of its own. engine_args: further arguments of `LLM`.
    """

    model: str
    policies: tuple[Variant, ...]
    budgets: tuple[str, ...]
    tasks: tuple[Task, ...]
    lengths: tuple[int, ...]
    samples: int
    seeds: tuple[int, ...]
    engine_args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """One scored result.

    Attributes:
        policy: the variant's label. budget: as asked for, "100%" where nothing is evicted.
        score: by the task's metric. digits: `Task.digits`.
    """

    task: Task
    policy: str
    budget: str
    length: int
    seed: int
    sample: Sample
    result: Result
    score: float
    digits: float | None


class Store:
    """The results of this and earlier runs, in a file of JSON lines.

    Args: see `vllm_pyramid.store`.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._file = ResultsFile(path, fresh=fresh)

    def get(self, key: str) -> Result | None:
        known = self._file.get(key)
        return None if known is None else Result(**known)

    def put(self, key: str, result: Result) -> None:
        self._file.put(key, asdict(result))

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class _Job:
    task: Task
    variant: Variant
    budget: str
    length: int
    seed: int
    sample: Sample
    request: Request


class Run:
    """The jobs of a run. Making one makes the samples; `execute` needs the engines.

    Raises:
        ValueError: a policy, budget, task or length that cannot work.
    """

    def __init__(self, settings: Settings, tokens: Tokens) -> None:
        self.settings = settings
        self.jobs: list[_Job] = []
        identity = identity_of_model(settings.model)
        made = [
            (task, length, seed, sample)
            for task in settings.tasks
            for length in task.lengths(settings.lengths)
            for seed in task.seeds(settings.seeds)
            for sample in task.samples(tokens, length, settings.samples, seed)
        ]
        encoded = [_encode(tokens, sample) for _, _, _, sample in made]
        longest = longest_of_model(settings.model)
        for (task, length, _, sample), (prompt, forced) in zip(made, encoded, strict=True):
            needed = len(prompt) + max(sample.max_tokens, len(forced)) + 1
            if longest is not None and needed > longest:
                raise ValueError(
                    f"the task {task.name!r} at length {length} needs {needed} tokens with its "
                    f"answer, and the model takes {longest}: ask for at most "
                    f"{length - (needed - longest)}"
                )
        for variant in settings.policies:
            policy = variant.load()
            _check_recall(policy, settings.tasks)
            for budget in budgets_of(policy, settings.budgets):
                if budget is not None:
                    variant.load(budget)  # raises where they do not suit each other
                policy_text = policy.model_dump_json(exclude={"budget"})
                where = [identity, settings.engine_args, policy_text, budget]
                for (task, length, seed, sample), (prompt, forced) in zip(
                    made, encoded, strict=True
                ):
                    what = [prompt, forced, sample.max_tokens, task.needs_recall]
                    key = key_of(where, what)
                    request = Request(key, prompt, budget, sample.max_tokens, forced)
                    shown = budget or "100%"
                    self.jobs.append(_Job(task, variant, shown, length, seed, sample, request))

    def missing(self, store: Store) -> dict[str, list[Request]]:
        """The requests that the store has no result of, by the policy's label; each once."""
        wanted: dict[str, dict[str, Request]] = {}
        for job in self.jobs:
            if store.get(job.request.key) is None:
                wanted.setdefault(job.variant.label, {})[job.request.key] = job.request
        return {label: list(requests.values()) for label, requests in wanted.items()}

    def execute(self, store: Store, on_stage: Stage, on_result: Callable[[], None]) -> None:
        """Fill the store, one engine after the other.

        Raises:
            ChildError: an engine failed.
        """
        recall = any(task.needs_recall for task in self.settings.tasks)
        variants = {variant.label: variant for variant in self.settings.policies}
        for label, requests in self.missing(store).items():
            longest = max(
                len(r.prompt_token_ids) + max(r.max_tokens, len(r.forced)) for r in requests
            )
            work = Work(
                model=self.settings.model,
                kv_policy=variants[label].policy,
                kv_policy_args=dict(variants[label].args),
                recall=recall,
                engine_args={"max_model_len": longest + 1, **self.settings.engine_args},
                batch=16,
                requests=sorted(requests, key=_order),
            )
            module = "vllm_pyramid.eval.engine"
            what = f"the engine with {label!r}"
            offline = Path(work.model).is_dir()
            with closing(run_child(module, asdict(work), what, offline=offline)) as said:
                for message in said:
                    if "stage" in message:
                        on_stage(f"{label}: {message['stage']}")
                    else:
                        store.put(message["key"], Result(**message["result"]))
                        on_result()

    def answers(self, store: Store) -> Iterator[Answer]:
        """Every job with its score.

        Raises:
            RuntimeError: a result is missing: the run was not executed to its end.
        """
        for job in self.jobs:
            result = store.get(job.request.key)
            if result is None:
                raise RuntimeError(
                    f"no result of {job.task.name} with {job.variant.label}, {job.budget}"
                )
            yield Answer(
                task=job.task,
                policy=job.variant.label,
                budget=job.budget,
                length=job.length,
                seed=job.seed,
                sample=job.sample,
                result=result,
                score=job.task.score(job.sample, result),
                digits=job.task.digits(job.sample, result),
            )


def _order(request: Request) -> tuple[int, int, int]:
    """The shortest first: the time left is then soon known, and never too small.

    Of prompts of about one length (within a factor of two) those with the shortest answers: a batch
    takes as many steps as its longest answer has tokens.
    """
    prompt, answer = len(request.prompt_token_ids), max(request.max_tokens, len(request.forced))
    return (prompt - 1).bit_length(), answer, prompt


def budgets_of(policy: Policy, budgets: Sequence[str]) -> list[str | None]:
    """The budgets to measure a policy at: one of None for a policy that evicts nothing."""
    return list(dict.fromkeys(budgets)) if policy.evicts else [None]


def _check_recall(policy: Policy, tasks: Sequence[Task]) -> None:
    """Raise ValueError if a task needs what nobody computes with this policy."""
    needing = [task.name for task in tasks if task.needs_recall]
    if policy.thinner is not None and needing:
        raise ValueError(
            f"policy {policy.name!r} thins prompts between layers, so no layer computes the full "
            f"attention that {', '.join(needing)} measures: name other tasks (--tasks), or leave "
            "the policy out"
        )


def _encode(tokens: Tokens, sample: Sample) -> tuple[list[int], list[int]]:
    prompt = tokens.encode(sample.prompt)
    if not sample.forced:
        return prompt, []
    both = tokens.encode(sample.prompt + sample.answers[0])
    if both[: len(prompt)] != prompt:
        raise ValueError(
            "this model's tokenizer does not split the prompt and its continuation at the same "
            f"place: near {sample.prompt[-20:]!r} and {sample.answers[0][:20]!r}"
        )
    return prompt, both[len(prompt) :]
