#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the built-in model and writes it to vllm_pyramid/tools/demo/model/.

    scripts/train_demo_model.py --docs /usr/share/doc/python3.11/html --run build/demo-model

The text is Python's documentation (Debian's package python3.11-doc, PSF licence). The curriculum
goes from sequences of 160 tokens to 4,096; a stage ends when the facts in it are recalled, or after
its largest number of steps. Each process takes one thread; `--resume` goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from demo_training.corpus import training_pages
from demo_training.episodes import ANSWER, READING, Writer, batch_row
from demo_training.export import write_model
from demo_training.llama import Llama, Shape
from demo_training.start import start_with_copying_heads
from demo_training.tokenizer import train_tokenizer
from tokenizers import Tokenizer
from torch.nn import functional as F

READING_WEIGHT = 0.5
# What a checkpoint holds of the trainer, beside the model and the optimizers.
SAVED = ("stage", "step", "total_steps", "tokens", "seconds", "exact")


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum: steps over sequences of one length, or of several in turn."""

    lengths: tuple[int, ...]
    tokens: int  # in a step, over all processes
    least_steps: int
    most_steps: int
    facts: tuple[int, int]
    mix: dict[str, float]  # the share of each kind of sequence
    rates: tuple[float, float]  # learning rate at its begin and end, as shares of the largest
    enough: float  # exact answers among the facts, running average


EARLY = {"repeats": 0.35, "facts": 0.65}
WIDER = {"repeats": 0.1, "facts": 0.5, "varied": 0.3, "key_values": 0.1}
ALL = {
    "repeats": 0.03,
    "facts": 0.18,
    "varied": 0.32,
    "key_values": 0.12,
    "several_values": 0.1,
    "both_questions": 0.08,
    "chains": 0.09,
    "classification": 0.08,
}
STAGES = (
    Stage((160,), 4096, 150, 3000, (2, 4), EARLY, (1.0, 1.0), 0.95),
    Stage((256,), 6144, 80, 320, (2, 8), WIDER, (1.0, 1.0), 0.95),
    Stage((512,), 8192, 150, 200, (2, 10), ALL, (0.8, 0.8), 0.97),
    Stage((1024,), 8192, 100, 150, (2, 12), ALL, (0.6, 0.6), 0.98),
    Stage((2048,), 8192, 60, 100, (3, 14), ALL, (0.5, 0.5), 0.98),
    Stage((4096,), 16384, 100, 100, (3, 16), ALL, (0.4, 0.07), 1.01),
    Stage((512, 1024, 2048, 4096), 8192, 340, 340, (1, 12), ALL, (0.4, 0.01), 1.01),
    Stage((1024, 2048, 4096), 8192, 220, 220, (1, 12), ALL, (0.25, 0.01), 1.01),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, required=True, help="Python's documentation, HTML")
    parser.add_argument("--run", type=Path, required=True, help="folder for checkpoints and log")
    parser.add_argument("--out", type=Path, help="where to write the model (default: RUN/model)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--resume", action="store_true", help="go on from RUN/checkpoint.pt")
    return parser.parse_args()


def optimizers(model: Llama, kind: str, lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    if kind == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.01)]
    return [
        torch.optim.Muon(matrices, lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Trainer:
    """One process's share of the training."""

    def __init__(self, options: argparse.Namespace, rank: int, pages: list[list[str]]) -> None:
        self.options, self.rank, self.world = options, rank, options.processes
        torch.set_num_threads(1)
        torch.manual_seed(options.seed)
        self.tokenizer = Tokenizer.from_file(str(options.run / "tokenizer.json"))
        self.shape = Shape()
        self.model = Llama(self.shape)
        start_with_copying_heads(self.model, options.seed)
        self.optimizers = optimizers(self.model, options.optimizer, options.lr)
        self.stage = self.step = self.total_steps = self.tokens = 0
        self.seconds = 0.0
        self.exact: dict[str, float] = {}
        if options.resume:
            self.load(options.run / "checkpoint.pt")
        for layer in self.model.model.layers:
            layer.compile(dynamic=False)
        rng = random.Random(options.seed * 1009 + self.total_steps * 31 + rank)
        self.writer = Writer(self.tokenizer, pages, rng)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for name in SAVED:
            setattr(self, name, state[name])

    def save(self) -> None:
        if self.rank:
            return
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        for name in SAVED:
            state[name] = getattr(self, name)
        scratch = self.options.run / "checkpoint.tmp"
        torch.save(state, scratch)
        scratch.rename(self.options.run / "checkpoint.pt")

    def run(self) -> None:
        while self.stage < len(STAGES):
            stage = STAGES[self.stage]
            started = time.monotonic()
            length = stage.lengths[self.step % len(stage.lengths)]
            record = self.train_step(stage, length)
            self.tokens += stage.tokens
            self.step += 1
            self.total_steps += 1
            self.seconds += time.monotonic() - started
            facts = self.exact.get("facts", 0.0)
            recalled = self.step >= stage.least_steps and facts >= stage.enough
            finished = recalled or self.step >= stage.most_steps
            if self.step % 10 == 0 or finished:
                self.log(stage, record)
            if finished:
                self.stage, self.step = self.stage + 1, 0
                self.exact.clear()
                self.save()
            elif self.step % 100 == 0:
                self.save()

    def learning_rate(self, stage: Stage) -> float:
        """Warm-up over the first 60 steps; a stage goes from its first rate to its last."""
        first, last = stage.rates
        rate = first + (last - first) * self.step / stage.most_steps
        return self.options.lr * rate * min(1.0, (self.total_steps + 1) / 60)

    def batch(self, stage: Stage, length: int) -> tuple[list[str], np.ndarray, np.ndarray]:
        rows = max(1, stage.tokens // length // self.world)
        kinds = self.writer.rng.choices(list(stage.mix), list(stage.mix.values()), k=rows)
        made = [batch_row(self.writer, kind, length + 1, stage.facts) for kind in kinds]
        return kinds, np.stack([ids for ids, _ in made]), np.stack([k for _, k in made])

    def train_step(self, stage: Stage, length: int) -> dict[str, float]:
        kinds, ids, roles = self.batch(stage, length)
        target_roles = roles[:, 1:].reshape(-1)
        answers = np.flatnonzero(target_roles == ANSWER)
        reading = np.flatnonzero(target_roles == READING)
        some = self.writer.rng.sample(range(len(reading)), min(len(reading), len(ids) * 64))
        chosen = np.concatenate((answers, reading[sorted(some)]))
        token_ids = torch.from_numpy(ids)
        targets = token_ids[:, 1:].reshape(-1)[chosen]
        weights = torch.full((len(chosen),), READING_WEIGHT)
        weights[: len(answers)] = 1.0

        cos, sin = self.model.rope(length)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model(token_ids[:, :-1], cos, sin)
            logits = self.model.logits(hidden.flatten(0, 1)[torch.from_numpy(chosen)])
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        self.reduce_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = self.learning_rate(stage)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        with torch.no_grad():
            right = (logits[: len(answers)].argmax(-1) == targets[: len(answers)]).numpy()
        self.score(kinds, answers, right, length)
        return {
            "loss": float(loss.detach()),
            "answer_loss": float(losses[: len(answers)].detach().mean()) if len(answers) else 0.0,
            "reading_loss": float(losses[len(answers) :].detach().mean()),
        }

    def reduce_gradients(self) -> None:
        if self.world == 1:
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= self.world
        for gradient, part in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(part.view_as(gradient))

    def score(self, kinds: list[str], answers: np.ndarray, right: np.ndarray, length: int) -> None:
        """Running averages, per kind of sequence, of the answers that are right in every token."""
        tally = torch.zeros(len(STAGES[-1].mix), 2)
        names = sorted(STAGES[-1].mix)
        if len(answers):
            starts = np.flatnonzero(np.diff(answers, prepend=-2) != 1)
            whole = np.logical_and.reduceat(right, starts)
            for start, exact in zip(answers[starts], whole, strict=True):
                row = names.index(kinds[start // length])
                tally[row] += torch.tensor([float(exact), 1.0])
        if self.world > 1:
            dist.all_reduce(tally)
        for name, (exact, count) in zip(names, tally.tolist(), strict=True):
            if count:
                old = self.exact.get(name, 0.0)
                keep = 0.9 if name in self.exact else 0.0
                self.exact[name] = keep * old + (1 - keep) * exact / count

    def log(self, stage: Stage, record: dict[str, float]) -> None:
        if self.rank:
            return
        line = {
            "length": max(stage.lengths),
            "step": self.step,
            "total_steps": self.total_steps,
            "minutes": round(self.seconds / 60, 2),
            **{name: round(value, 4) for name, value in record.items()},
            "exact": {name: round(value, 3) for name, value in sorted(self.exact.items())},
        }
        with (self.options.run / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def work(rank: int, options: argparse.Namespace, pages: list[list[str]]) -> None:
    if options.processes > 1:
        store = dist.FileStore(str(options.run / "rendezvous"), options.processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=options.processes)
    trainer = Trainer(options, rank, pages)
    trainer.run()
    if rank == 0:
        out = options.out or options.run / "model"
        about = {
            "seed": options.seed,
            "steps": trainer.total_steps,
            "tokens": trainer.tokens / 1e6,
            "length": max(STAGES[-1].lengths),
        }
        write_model(out, trainer.model, trainer.tokenizer, about)
        print(f"wrote {out}")
    if options.processes > 1:
        dist.destroy_process_group()


def main() -> None:
    options = arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_NUM_THREADS"] = "1"
    options.run.mkdir(parents=True, exist_ok=True)
    (options.run / "rendezvous").unlink(missing_ok=True)
    pages = training_pages(options.docs)
    if not (options.run / "tokenizer.json").is_file():
        texts = [paragraph for page in pages for paragraph in page]
        tokenizer = train_tokenizer(texts, Shape().vocab_size)
        tokenizer.save(str(options.run / "tokenizer.json"))
    if options.processes == 1:
        work(0, options, pages)
    else:
        mp.spawn(work, (options, pages), nprocs=options.processes)


if __name__ == "__main__":
    main()
