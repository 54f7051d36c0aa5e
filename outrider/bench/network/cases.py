"""Cases of `outrider bench network`: decoding modes, links and remote drafters, with the parsers of their options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.protocol.errors import InvalidRequest
from outrider.testing.link_emulator import LinkShape

PLAIN, ADAPTIVE = "plain", "adaptive"
GAMMA = 16
WARM_TOKENS = 64  # generated and discarded before a link is measured
_BRANCHES = 3
_PROBE_BYTES = 240  # both directions together
_FEW_RTTS = (15.0, 80.0)  # of every drafter except the first
_MAX_MS = 10_000.0
_LINK = re.compile(r"(?P<rtt>[0-9.]+)(~(?P<jitter>[0-9.]+))?(@(?P<kib>[0-9.]+))?")


@dataclass(frozen=True, slots=True)
class NetworkMode:
    """Decoding options of a request. An option that is None stays adaptive."""

    name: str
    gamma: int | None = None
    ahead: bool | None = None
    branches: int | None = None

    @property
    def request_options(self) -> dict[str, Any]:
        given = {"gamma": self.gamma, "ahead": self.ahead, "branches": self.branches}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class LinkCase:
    """Emulated link to a drafter."""

    rtt_ms: float
    jitter_ms: float = 0.0
    kib_per_s: float = 0.0
    drafter: str = ""  # label; empty for the first drafter

    @property
    def shape(self) -> LinkShape:
        return LinkShape(self.rtt_ms / 2, self.jitter_ms, 1024 * self.kib_per_s)

    @property
    def probe_ms(self) -> float:
        """Return the mean time of the coordinator's probe of the drafter."""
        transfer = 1000 * _PROBE_BYTES / (1024 * self.kib_per_s) if self.kib_per_s else 0.0
        return self.rtt_ms + self.jitter_ms + transfer

    @property
    def label(self) -> str:
        text = f"{self.rtt_ms:g} ms"
        if self.jitter_ms:
            text += f", jitter {self.jitter_ms:g} ms"
        text += f", {self.kib_per_s:g} KiB/s" if self.kib_per_s else ""
        return text + (f", drafter {self.drafter}" if self.drafter else "")


@dataclass(frozen=True, slots=True)
class RemoteDrafter:
    """Drafter to measure: acceptance of its first guess, and milliseconds of its step."""

    acceptance: float
    draft_ms: float

    @property
    def label(self) -> str:
        return f"{self.acceptance:g}, {self.draft_ms:g} ms"


def modes(gammas: Sequence[int]) -> list[NetworkMode]:
    return [
        NetworkMode(PLAIN, 0),
        *(NetworkMode(f"in turns, γ {gamma}", gamma, ahead=False, branches=1) for gamma in gammas),
        NetworkMode("chain ahead", GAMMA, ahead=True, branches=1),
        NetworkMode("tree ahead", GAMMA, ahead=True, branches=_BRANCHES),
        NetworkMode(ADAPTIVE),
    ]


def link_cases(*, quick: bool) -> list[LinkCase]:
    if quick:
        return [LinkCase(0.0), LinkCase(15.0), LinkCase(80.0)]
    lengths = [LinkCase(rtt) for rtt in (0.0, 5.0, 15.0, 40.0, 80.0, 150.0)]
    jittered = [LinkCase(rtt, jitter_ms=rtt / 4) for rtt in (15.0, 80.0)]
    return [*lengths, *jittered, *[LinkCase(rtt, kib_per_s=32.0) for rtt in (15.0, 80.0)]]


def few_links(links: Sequence[LinkCase]) -> list[LinkCase]:
    """Return the links for every drafter except the first."""
    return [link for link in links if link in [LinkCase(rtt) for rtt in _FEW_RTTS]] or list(links[:1])


def parse_drafters(text: str) -> list[RemoteDrafter]:
    """Parse `0.8:4,0.5:16`: acceptance and milliseconds of each drafter."""
    drafters = []
    for part in text.split(","):
        acceptance, _, draft_ms = part.partition(":")
        try:
            drafters.append(RemoteDrafter(float(acceptance), float(draft_ms)))
        except ValueError as error:
            raise InvalidRequest.of("--drafters", text, "acceptance:ms, separated by commas") from error
        if not (0.05 <= drafters[-1].acceptance <= 0.99 and 0.0 <= drafters[-1].draft_ms <= 10_000.0):
            raise InvalidRequest.of("--drafters", part, "acceptance in [0.05, 0.99], ms in [0, 10000]")
    return drafters


def parse_links(text: str) -> list[LinkCase]:
    """Parse comma-separated links: `15`, `15~4` (jitter), `15@32` (KiB/s) or `15~4@32`."""
    links = []
    for part in text.split(","):
        match = _LINK.fullmatch(part.strip())
        try:
            if match is None:
                raise ValueError("no link")
            links.append(LinkCase(float(match["rtt"]), float(match["jitter"] or 0), float(match["kib"] or 0)))
        except ValueError as error:
            raise InvalidRequest.of("--rtts", part, "ms, ms~jitter, ms@KiB/s or ms~jitter@KiB/s") from error
        if max(links[-1].rtt_ms, links[-1].jitter_ms) > _MAX_MS:
            raise InvalidRequest.of("--rtts", part, f"at most {_MAX_MS:g} ms")
    return links
