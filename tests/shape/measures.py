"""All measures, with what they should come to and what they may be at most today."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.shape import guesses, imports, layout, params, rounds, sentences, sources

CEILINGS = Path(__file__).with_name("ceilings.json")
_NOT_THE_PRODUCT = "loadtest"  # measures the product from outside
_MULTIPLEX = "outrider/multiplex/"
# Each has lines of its own beside the product's: capabilities newer than that target, the simulation, which no service
# runs, and the benchmarks, which users install apart. A file counts for the first whose pattern is part of its path;
# the number is the target.
_APART: dict[str, tuple[Sequence[str], int]] = {
    "lines of the attached mode": (("coordinator/attachment/", "outrider/engine/vllm/attached/"), 900),
    "lines of the vLLM adapter": (("outrider/engine/vllm/", "verifier/target.py", "verifier/vllm_target.py"), 1_500),
    "lines of published drafters": (("drafter/published/", "methods/published", "models/published_drafters.py"), 2_120),
    "lines of training in published formats": (("outrider/train/published/",), 705),
    "lines of formats beside tools": (("coordinator/api/http/agents/formats.py",), 44),
    "lines of forms of calls": (("coordinator/api/http/agents/calls/", "settings/tool_parsers.py"), 769),
    "lines of harmony": (("coordinator/api/http/agents/gpt_oss/",), 174),
    "lines of truncation": (("coordinator/api/http/agents/truncation.py",), 47),
    "lines of the agents' API": (("coordinator/api/http/agents/",), 1_610),
    "lines of the Messages API": (("coordinator/api/http/messages/",), 537),
    "lines of a grammar's trial": (("coordinator/workers/grammar_trial.py",), 98),
    "lines of several targets": (("coordinator/workers/targets/", "outrider/launch/targets.py"), 300),
    "lines of limits per model": (("coordinator/admission/model_limits.py",), 110),
    "lines of priorities and deadlines": (("coordinator/admission/waiting/",), 370),
    "lines of placement": (("coordinator/placement/",), 160),
    "lines of direct hand-over": (("outrider/base/step_loop.py", "multiplex/direct_call.py"), 147),
    "lines of pings": (("multiplex/pings.py",), 56),
    "lines of multiplexed streams": ((_MULTIPLEX,), 733),
    "lines of Triton kernels": (("outrider/speculation/triton_", "outrider/engine/cuda/triton_"), 300),
    "lines of kinds of text": (("coordinator/sessions/text_kinds/",), 170),
    "lines of earlier hidden states": (("/earlier_states", "hidden_states/received"), 350),
    "lines of hidden states": (("/hidden_states",), 1_100),
    "lines of goodput": (("/goodput.py",), 160),
    "lines of scaled positions in GGUF files": (("models/gguf_rope.py",), 40),
    "lines of prompt shares": (("verifier/shares/prompt_shares.py",), 50),
    "lines of drafter shares": (("drafter/shares/",), 230),
    "lines of the simulation": (("coordinator/control/simulation/",), 620),
    "lines of the fleet's benchmark": (("outrider/bench/fleet/",), 880),
    "lines of benchmarks": (("outrider/bench/",), 3_650),
}


@dataclass(frozen=True)
class Measure:
    """One figure, the target that it should come down to, and what was counted."""

    name: str
    now: float
    target: float
    found: Sequence[str] = ()
    note: str = ""
    step: float = 1  # ceilings are multiples of it: a figure that moves with every change has room up to the next one

    @property
    def met(self) -> bool:
        return self.now <= self.target

    @property
    def ceiling(self) -> float:
        """The lowest ceiling that it can have today."""
        return max(self.target, math.ceil(self.now / self.step) * self.step)


def static() -> list[Measure]:
    """Measure what the files alone show."""
    product = sources.product()
    typed = [*product, *sources.contract()]
    return [*_shapes(typed, product), *_layout(product), *_cycles(product), *_words(product)]


def of_rounds() -> list[Measure]:
    """Measure what a round runs; see `rounds`."""
    measured = rounds.measure()
    by_process = {
        name: [function for function in functions if not function.startswith(_MULTIPLEX)]
        for name, functions in measured.by_process.items()
    }
    shared = [function for function in measured.functions if function.startswith(_MULTIPLEX)]
    own = rounds.Rounds(by_process)
    found = [f"{name}: {function}" for name, functions in by_process.items() for function in functions]
    note = ", ".join(f"{name} {len(functions)}" for name, functions in by_process.items())
    return [
        Measure("functions run in a round", len(own.functions), 120, found, note, step=5),
        Measure("files run in a round", len(own.files), 20, own.files),
        Measure("functions of multiplexed streams run in a round", len(shared), 30, shared),
    ]


def _shapes(typed: Sequence[sources.Source], product: Sequence[sources.Source]) -> Iterable[Measure]:
    walkers = guesses.parent_walkers(product)
    where = [f"{path}: {', '.join(functions)}" for path, functions in sorted(walkers.items())]
    yield _count("types that carry a guess", guesses.guess_types(typed), 9)
    yield _count("modules that find paths from parents", where, 1)
    yield _count("conversions of sampling parameters", params.conversions(typed), 3)


def _layout(product: Sequence[sources.Source]) -> Iterable[Measure]:
    folders = layout.modules_by_folder(product)
    measured = [package for package in sources.packages() if package != _NOT_THE_PRODUCT]
    apart = dict.fromkeys(_APART, 0)
    for source in product:
        found = (name for name, (patterns, _) in _APART.items() if any(part in source.path for part in patterns))
        if (name := next(found, None)) is not None:
            apart[name] += source.lines
    lines = layout.lines_of(product, measured) - sum(apart.values())
    beside = layout.lines_of(product, [_NOT_THE_PRODUCT])
    full = [f"{folder}: {number} modules" for number, folder in folders]
    yield Measure("modules in a folder, at most", folders[0][0], 14, full)
    yield _count(f"files over {layout.LONG_FILE_LINES} lines", layout.long_files(product), 0)
    yield _count(f"classes over {layout.BIG_CLASS_METHODS} methods", layout.big_classes(product), 8)
    yield _count("class names used more than once", layout.repeated_class_names(product), 0)
    yield Measure("product lines", lines, 23_500, note=f"and {beside} in {_NOT_THE_PRODUCT}", step=500)
    yield from (Measure(name, apart[name], target) for name, (_, target) in _APART.items())


def _cycles(product: Sequence[sources.Source]) -> Iterable[Measure]:
    graph = imports.imports(product)
    yield _count("import cycles of modules", map(" ⇄ ".join, imports.cycles(graph)), 0)
    yield _count("import cycles within a package", map(" ⇄ ".join, imports.package_cycles(graph)), 0)


def _words(product: Sequence[sources.Source]) -> Iterable[Measure]:
    documents = sources.documents()
    written = [found for source in product for found in sentences.docstrings(source)]
    half = sentences.half_docstrings(product)
    banned = sentences.banned_in([*product, *sources.contract(), *documents])
    yield _count("docstrings of half a sentence", half, 0, f"{len(half) / len(written):.0%} of {len(written)}")
    yield _count("docstrings that ruff refuses", sentences.refused_by_ruff(sources.packages()), 0, "D401, D404")
    yield _count("banned words", banned, 0)
    # "Below 16": a median is a whole number or lies half-way between two.
    docs = sentences.median_words(source.text for source in documents)
    yield Measure("words in a sentence of the docs", docs, 15.5, note="median", step=0.5)
    yield Measure(
        "words in a sentence of docstrings",
        sentences.median_words(d.text for d in written),
        15.5,
        note="median",
        step=0.5,
    )


def _count(name: str, found: Iterable[str], target: int, note: str = "") -> Measure:
    listed = list(found)
    return Measure(name, len(listed), target, listed, note)


def ceilings() -> dict[str, float]:
    """Return what each measure may be at most."""
    known: dict[str, float] = json.loads(CEILINGS.read_text())
    return known


def over(measures: Iterable[Measure], bounds: Mapping[str, float]) -> list[str]:
    """Say which measures are above their ceilings."""
    return [f"{m.name}: {m.now:g}, at most {bounds[m.name]:g}" for m in measures if m.now > bounds[m.name]]


def lowered(measures: Iterable[Measure], bounds: Mapping[str, float]) -> dict[str, float]:
    """Return the ceilings that can be lower than they are; none is ever below its target."""
    return {m.name: m.ceiling for m in measures if m.ceiling < bounds.get(m.name, math.inf)}
