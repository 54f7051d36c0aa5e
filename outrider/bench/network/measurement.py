"""Measurement of one remote drafter: every mode over every link, and over a link that changes during the answer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from outrider.bench.common.remote_pair import RemoteSetup, ThrottledTimes, ToyPair
from outrider.bench.common.timed_output import timed
from outrider.bench.network.cases import ADAPTIVE, PLAIN, WARM_TOKENS, LinkCase, NetworkMode
from outrider.bench.network.figures import NetworkResults, NetworkRun, NetworkRuns
from outrider.bench.network.prediction import verifier_cost
from outrider.protocol.sampling_params import SamplingParams

PROMPT = tuple(range(40, 72))
_DRIFT = ((15.0, 0.0), (80.0, 0.6), (5.0, 0.0), (40.0, 0.6))  # round trip in ms, noise on the drafter's distribution


def drift_blur(part: int) -> str:
    """Return the drafter's `--blur` for a run whose link and acceptance change every `part` tokens."""
    starts = [len(PROMPT) + part * number for number in range(len(_DRIFT))]
    return ",".join(f"{start}:{amount:g}" for start, (_, amount) in zip(starts, _DRIFT, strict=True))


class NetworkMeasurement:
    """Measurement of one drafter; `results` collects its figures."""

    def __init__(
        self, setup: RemoteSetup, modes: Sequence[NetworkMode], tokens: int, rounds: int, results: NetworkResults
    ) -> None:
        self._setup = setup
        self._modes = modes
        self._tokens = tokens
        self._rounds = rounds
        self._results = results

    def measure(self, link: LinkCase, pair: ToyPair, times: ThrottledTimes, notify: Callable[[str], None]) -> None:
        """Run all modes in turn, round by round."""
        self._setup.network.link.shape = link.shape
        self._setup.wait_for_round_trip(link.probe_ms)
        by_mode = {mode: NetworkRuns() for mode in self._modes}
        self._generate(NetworkMode(ADAPTIVE), seed=1_000, tokens=WARM_TOKENS)
        for number in range(self._rounds):
            for mode, runs in by_mode.items():
                notify(f"{link.label}: {mode.name}, answer {number + 1} of {self._rounds}")
                run = self._generate(mode, seed=number, tokens=self._tokens)
                runs.runs.append(run)
                self._results.add_text(number, run.tokens)
        self._results.measured[link] = by_mode
        self._results.worlds[link] = {
            "acceptance": pair.acceptance,
            "gain": pair.gain,
            "draft_ms": times.draft_ms,
            "cost": verifier_cost(times),
            "rtt_ms": link.rtt_ms,
            "jitter_ms": link.jitter_ms,
        }

    def measure_drift(self, notify: Callable[[str], None]) -> dict[str, Any]:
        """Measure every mode while link and acceptance change three times during the answer."""
        taken: dict[str, list[list[float]]] = {mode.name: [] for mode in self._modes}
        self._generate_with_drift(NetworkMode(ADAPTIVE), seed=1_077)
        for number in range(self._rounds):
            for mode in self._modes:
                notify(f"changing link: {mode.name}, answer {number + 1} of {self._rounds}")
                taken[mode.name].append(self._generate_with_drift(mode, seed=2_000 + number))
        parts = {name: [statistics.median(part) for part in zip(*runs, strict=True)] for name, runs in taken.items()}
        fixed = {name: sum(seconds) for name, seconds in parts.items() if name != ADAPTIVE}
        best = min(fixed, key=fixed.__getitem__)
        spent = sum(parts[ADAPTIVE])
        ideal = sum(min(part) for part in zip(*(parts[name] for name in fixed), strict=True))
        return {
            "parts": [{"rtt_ms": rtt, "blur": blur} for rtt, blur in _DRIFT],
            "seconds": parts,
            "best_fixed": best,
            "regret": max(0.0, 1.0 - fixed[best] / spent),
            "regret_of_parts": max(0.0, 1.0 - ideal / spent),  # against the best fixed mode of every part
            "vs_plain": fixed[PLAIN] / spent,
        }

    def _generate_with_drift(self, mode: NetworkMode, *, seed: int) -> list[float]:
        """Return the seconds that each part of the answer took."""
        self._setup.network.link.shape = LinkCase(_DRIFT[0][0]).shape
        self._setup.wait_for_round_trip(_DRIFT[0][0])
        taken: list[float] = []
        began = 0.0

        def on_tokens(count: int) -> None:
            nonlocal began
            now = time.perf_counter()
            began = began or now
            while count >= self._tokens * (len(taken) + 1):  # one message may end several parts
                taken.append(now - began)
                began = now
                if len(taken) < len(_DRIFT):
                    self._setup.network.link.shape = LinkCase(_DRIFT[len(taken)][0]).shape

        run = self._generate(mode, seed=seed, tokens=self._tokens * len(_DRIFT), on_tokens=on_tokens)
        self._results.add_text(seed, run.tokens)
        return taken

    def _generate(
        self, mode: NetworkMode, *, seed: int, tokens: int, on_tokens: Callable[[int], None] = lambda _: None
    ) -> NetworkRun:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True)
        replies = self._setup.client.generate(tokens=PROMPT, params=params, **mode.request_options)
        output = timed(replies, on_tokens)
        gaps: list[float] = []
        for gap_ms, (_, count) in zip(output.gaps_ms, output.arrivals[1:], strict=True):
            gaps += [gap_ms, *[0.0] * (count - 1)]
        return NetworkRun(output.tokens, tuple(gaps), output.finished.stats)
