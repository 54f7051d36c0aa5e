"""The training loop of all methods: batches, steps, checkpoints, reports."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.base.atomic_files import atomic_write
from outrider.protocol.errors import InvalidRequest, StartupError
from outrider.train.data import Example
from outrider.train.methods.interface import Batch, Method, acceptance, collate

CHECKPOINT = "checkpoint.pt"
_CHECKPOINT_S = 60.0
_REPORTED_STEPS = 50  # the reported loss is their mean
_POOL = 256  # examples that are sorted by length before they are grouped
_WARM_UP = 0.02
_FLOOR = 0.02
_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Everything that decides a run besides data and method."""

    tokens: int  # in total; a token counts each time it is used
    step_tokens: int = 2_000
    learning_rate: float = 1e-3
    places: int = 384  # positions used of each example
    seed: int = 0
    gamma: int = 4  # length of the held-out chains


@dataclass(frozen=True, slots=True)
class Report:
    """The progress of a run."""

    step: int
    tokens: int
    total: int
    loss: float
    held_out: dict[str, Any]  # last measurement
    measured_at: int  # number of tokens at that measurement


class Training:
    """A run of the loop, which continues from its checkpoint."""

    def __init__(
        self,
        method: Method,
        examples: Sequence[Example],
        held_out: Mapping[str, Sequence[Example]],
        plan: TrainingPlan,
        folder: Path,
        identity: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._method = method
        self._examples = [example for example in examples if len(example.tokens) > 2]
        if not self._examples:
            raise InvalidRequest.of("prompts", f"{len(examples)} texts of the target", "some of three tokens or more")
        self._held_out = held_out
        self._plan = plan
        self._path = folder / CHECKPOINT
        decided = json.dumps({**identity, **asdict(plan)}, sort_keys=True, default=str)
        self._identity = hashlib.sha256(decided.encode()).hexdigest()
        self._device = device
        self._trained = {n: p for n, p in method.module.named_parameters() if p.requires_grad}
        fused = device.type == "cpu"
        self._optimizer = torch.optim.AdamW(self._trained.values(), betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        self.step = self.tokens = 0
        self.seconds = 0.0  # spent on steps, over all interruptions

    def run(self, progress: Callable[[Report], None] = lambda _: None, measurements: int = 10) -> dict[str, Any]:
        """Train on all tokens, and return the acceptance on held-out texts. It is measured `measurements` times."""
        self._resume()
        losses: deque[float] = deque(maxlen=_REPORTED_STEPS)
        held_out, measured_at = self.measure(), self.tokens
        saved = time.monotonic()
        for batch in self._batches():
            if self.tokens >= self._plan.tokens:
                break
            started = time.monotonic()
            losses.append(self._train_step(batch))
            self.seconds += time.monotonic() - started
            if self.tokens - measured_at >= self._plan.tokens / measurements:
                measured_at, held_out = self.tokens, self.measure()
            if time.monotonic() - saved > _CHECKPOINT_S:
                self._save()
                saved = time.monotonic()
            loss = sum(losses) / len(losses)
            progress(Report(self.step, self.tokens, self._plan.tokens, loss, held_out, measured_at))
        self._save()
        return self.measure()

    def measure(self) -> dict[str, Any]:
        """Return greedy acceptance on the held-out texts, by kind and over all."""
        self._method.module.eval()
        found: dict[str, torch.Tensor] = {}  # accepted lengths and how many guesses fit: [2, positions]
        for kind, examples in self._held_out.items():
            few = (examples[i : i + 8] for i in range(0, len(examples), 8))
            batches = [collate(each, self._plan.places, self._device) for each in few]
            with self._autocast(), torch.inference_mode():
                pairs = [torch.stack([self._method.evaluate(batch), batch.room]).flatten(1) for batch in batches]
            found[kind] = torch.cat(pairs, dim=1).cpu()
        self._method.module.train()
        kinds = {kind: acceptance(each, self._plan.gamma) for kind, each in found.items()}
        overall = {"all": acceptance(torch.cat(list(found.values()), dim=1), self._plan.gamma)}
        return overall | kinds | overall  # a kind may have its name

    def _train_step(self, batch: Batch) -> float:
        generator = torch.Generator().manual_seed(self._plan.seed * 1_000_003 + self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = self._plan.learning_rate * self._schedule()
        with self._autocast():
            loss = self._method.loss(batch, generator, self.tokens / self._plan.tokens)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), _CLIP)
        value = loss.item()
        if not math.isfinite(value + float(norm)):
            found = f"the loss became {value} with gradients of {float(norm)} at step {self.step}"
            message = f"{found}: try a lower --learning-rate"
            raise StartupError(message, field="learning_rate", value=self._plan.learning_rate)
        self._optimizer.step()
        self.step += 1
        self.tokens += int(batch.lengths.sum())
        return value

    def _schedule(self) -> float:
        """Return the factor of the learning rate: a short warm-up, then a cosine."""
        done = self.tokens / self._plan.tokens
        if done < _WARM_UP:
            return max(_FLOOR, done / _WARM_UP)
        return max(_FLOOR, 0.5 + 0.5 * math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16)

    def _batches(self) -> Iterator[Batch]:
        """Yield batches without end. Interruptions do not change them."""
        step = epoch = 0
        while True:
            for group in self._groups(epoch):
                if step >= self.step:
                    generator = torch.Generator().manual_seed(self._plan.seed * 999_983 + step)
                    yield collate([self._examples[i] for i in group], self._plan.places, self._device, generator)
                step += 1
            epoch += 1

    def _groups(self, epoch: int) -> list[list[int]]:
        """Return all examples once, grouped by length to reduce padding."""
        generator = torch.Generator().manual_seed(self._plan.seed * 7_919 + epoch)
        order = torch.randperm(len(self._examples), generator=generator).tolist()
        groups: list[list[int]] = []
        for first in range(0, len(order), _POOL):
            group: list[int] = []
            for i in sorted(order[first : first + _POOL], key=lambda i: len(self._examples[i].tokens)):
                if group and (len(group) + 1) * len(self._examples[i].tokens) > self._plan.step_tokens:
                    groups.append(group)
                    group = []
                group.append(i)
            groups.append(group)
        return [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "identity": self._identity,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "weights": {name: weight.detach() for name, weight in self._trained.items()},
            "optimizer": self._optimizer.state_dict(),
        }
        with atomic_write(self._path) as file:
            torch.save(state, file)

    def _resume(self) -> None:
        if not self._path.is_file():
            return
        try:
            state = torch.load(self._path, map_location=self._device, weights_only=True)
            identity, weights = state["identity"], state["weights"]
        except (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
            message = f"the checkpoint {self._path} is damaged ({error}); start over with --restart"
            raise StartupError(message, field="out", value=str(self._path)) from error
        if identity != self._identity:
            problem = f"{self._path} belongs to a run with other data or settings"
            message = f"{problem}; use the same ones to continue it, or start over with --restart"
            raise StartupError(message, field="out", value=str(self._path))
        with torch.no_grad():
            for name, weight in self._trained.items():
                weight.copy_(weights[name])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
