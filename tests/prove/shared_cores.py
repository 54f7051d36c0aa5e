"""Adaptive sessions over plain ones, where drafter and verifier share the cores of this machine.

python -m tests.prove.shared_cores --sessions 1,8,32 --rounds 6

The default pair runs in processes of its own. In each round as many chats as `--sessions` says run at once, adaptive
and plain in turns, and which goes first alternates. Each has a cache salt of its own, and `ignore_eos`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider import AsyncClient, SamplingParams
from outrider.client.events import Finished, Tokens
from outrider.launch.stack import LaunchPlan, Stack, stack
from outrider.models.drafter_choice import best_drafter
from outrider.protocol.statistics import GenerationStats
from outrider.train.data import read_prompts, shipped

MODES = ("plain", "adaptive")
_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # it ends with this process at the latest
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Answers:
    """The answers of as many sessions, all at once."""

    tokens_per_s: float  # of all sessions, from the first request to the last token
    decoding_per_s: float  # of a session after its first token, on average
    cpu_s: dict[str, float]  # by process
    stats: list[GenerationStats] = field(default_factory=list)

    @property
    def guesses(self) -> float:
        """Return the guesses checked per step of a session."""
        steps = sum(each.steps for each in self.stats)
        return sum(sum(each.offered_per_position) for each in self.stats) / max(1, steps)

    def report(self, tokens: int) -> str:
        plans: Counter[str] = Counter()
        for each in self.stats:
            plans.update({plan.plan: plan.steps for plan in each.plans if plan.steps})
        cpu = ", ".join(f"{name} {1000 * spent / tokens:.2f}" for name, spent in self.cpu_s.items())
        states = sum(each.feature_bytes for each in self.stats) / 1e3
        most = ", ".join(f"{plan} {steps}" for plan, steps in plans.most_common(4))
        return f"{self.guesses:.2f} guesses a step; CPU ms/token: {cpu}; hidden states {states:.0f} kB; {most}"


@contextlib.contextmanager
def default_pair(*, together: bool = True) -> Iterator[Stack]:
    """Start the default target with its drafter, in one process or in two."""
    with stack(LaunchPlan(drafters=((best_drafter("default"), ""),), port=0, together=together)) as running:
        yield running


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Compute without pause beside the measurement."""
    with contextlib.ExitStack() as exits:
        for _ in range(processes):
            exits.callback(subprocess.Popen([sys.executable, "-c", _BUSY, str(os.getpid())]).kill)
        yield


async def answer(running: Stack, texts: Sequence[str], mode: str, params: SamplingParams) -> Answers:
    """Generate one answer to each text, all at once."""
    began = time.perf_counter()
    arrivals: list[list[tuple[float, int]]] = []
    stats: list[GenerationStats] = []
    before = _cpu_s(running)
    salt = secrets.token_hex()

    async def one(client: AsyncClient, text: str) -> None:
        own: list[tuple[float, int]] = []
        arrivals.append(own)
        gamma = 0 if mode == "plain" else None
        async for reply in client.generate(chat=[("user", text)], params=params, gamma=gamma, cache_salt=salt):
            if isinstance(reply, Tokens):
                own.append((time.perf_counter(), len(reply.token_ids)))
            elif isinstance(reply, Finished):
                stats.append(reply.stats)

    async with AsyncClient(running.endpoints, timeout_s=300.0) as client:
        await asyncio.gather(*(one(client, text) for text in texts))
    spent = {name: after - before[name] for name, after in _cpu_s(running).items()}
    total = sum(count for own in arrivals for _, count in own)
    ended = max(own[-1][0] for own in arrivals)
    speeds = [sum(count for _, count in own[1:]) / max(1e-9, own[-1][0] - own[0][0]) for own in arrivals]
    return Answers(total / (ended - began), statistics.fmean(speeds), spent, stats)


async def measure(
    running: Stack, texts: Sequence[str], sessions: int, rounds: int, params: SamplingParams, verbose: bool = False
) -> list[dict[str, Answers]]:
    """Return the answers of each round, by mode. The prompts of a round are those of the next `sessions`."""
    found = []
    for number in range(rounds):
        chosen = [texts[(number * sessions + index) % len(texts)] for index in range(sessions)]
        order = MODES if number % 2 else MODES[::-1]
        answers = {mode: await answer(running, chosen, mode, params) for mode in order}
        found.append(answers)
        if verbose:
            plain, adaptive = (answers[mode] for mode in MODES)
            ratios = f"{adaptive.tokens_per_s / plain.tokens_per_s:.3f}"
            ratios += f" (decoding {adaptive.decoding_per_s / plain.decoding_per_s:.3f})"
            print(f"  round {number}: {adaptive.tokens_per_s:.1f} / {plain.tokens_per_s:.1f} tokens/s = {ratios}")
            for mode in MODES:
                print(f"    {mode}: {answers[mode].report(sessions * params.max_tokens)}", flush=True)
    return found


def ratios(found: Sequence[dict[str, Answers]]) -> list[float]:
    """Return adaptive over plain, round by round."""
    return [answers["adaptive"].tokens_per_s / answers["plain"].tokens_per_s for answers in found]


def summary(found: Sequence[dict[str, Answers]]) -> dict[str, Any]:
    own = ratios(found)
    decoding = [answers["adaptive"].decoding_per_s / answers["plain"].decoding_per_s for answers in found]
    return {
        "median": statistics.median(own),
        "range": (min(own), max(own)),
        "decoding": statistics.median(decoding),
        "decoding_range": (min(decoding), max(decoding)),
        "plain": statistics.median(answers["plain"].tokens_per_s for answers in found),
        "guesses": statistics.fmean(answers["adaptive"].guesses for answers in found),
    }


def by_kind(found: Sequence[dict[str, Answers]], kinds: Sequence[str]) -> dict[str, tuple[float, float, float]]:
    """Return for each kind of prompt, one session at a time: all its answers over plain ones, the median, the worst."""
    result = {}
    for kind in dict.fromkeys(kinds):
        own = [answers for number, answers in enumerate(found) if kinds[number % len(kinds)] == kind]
        spent = {mode: sum(1.0 / answers[mode].decoding_per_s for answers in own) for mode in MODES}
        each = [answers["adaptive"].decoding_per_s / answers["plain"].decoding_per_s for answers in own]
        result[kind] = (spent["plain"] / spent["adaptive"], statistics.median(each), min(each))
    return result


def line(sessions: int, found: dict[str, Any]) -> str:
    low, high = found["range"]
    return (
        f"{sessions} sessions: adaptive {found['median']:.3f} x plain ({low:.3f} to {high:.3f}), decoding alone "
        f"{found['decoding']:.3f}; plain {found['plain']:.1f} tokens/s; {found['guesses']:.2f} guesses a step"
    )


def _cpu_s(running: Stack) -> dict[str, float]:
    """Return the CPU time that each process has taken."""
    found = {}
    for child in running.children:
        assert child.process is not None
        fields = Path(f"/proc/{child.process.pid}/stat").read_text().rpartition(") ")[2].split()
        found[child.name] = (int(fields[11]) + int(fields[12])) / _TICKS
    return found


async def _run(options: argparse.Namespace) -> None:
    prompts = read_prompts(options.prompts) if options.prompts else shipped("heldout")
    kinds = options.kinds.split(",") if options.kinds else sorted({prompt.kind for prompt in prompts})
    texts = [prompt.text for prompt in prompts if prompt.kind in kinds]
    params = SamplingParams(temperature=options.temperature, seed=1, max_tokens=options.tokens, ignore_eos=True)
    rows = {}
    with default_pair(together=not options.apart) as running, busy(options.busy):
        for sessions in map(int, options.sessions.split(",")):
            if not options.cold:
                await answer(running, texts[-max(1, min(sessions, 8)) :], "adaptive", params)
            found = await measure(running, texts, sessions, options.rounds, params, options.verbose)
            rows[sessions] = summary(found)
            print(line(sessions, rows[sessions]), flush=True)
            if sessions == 1:
                rows[sessions]["kinds"] = by_kind(found, [prompt.kind for prompt in prompts if prompt.kind in kinds])
                for kind, (whole, median, worst) in rows[sessions]["kinds"].items():
                    print(
                        f"  {kind}: {whole:.3f} x plain after the first token; median {median:.3f}, worst {worst:.3f}"
                    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", default="1,8,32", help="numbers of concurrent chats, separated by commas")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--apart", action="store_true", help="run the drafter in a process of its own")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=Path, help="file with prompts: one JSON object per line; default: shipped")
    parser.add_argument("--kinds", default="", help="kinds of prompts, separated by commas; default: all")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute beside the measurement")
    parser.add_argument("--cold", action="store_true", help="measure the first answers of a pair, too")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--verbose", action="store_true", help="show each round")
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
