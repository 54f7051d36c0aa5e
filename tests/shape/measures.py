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
# A capability newer than the target of product lines has a measure of its own.
_VLLM = ("outrider/engine/vllm/", "verifier/target.py", "verifier/vllm_target.py")
_KERNELS = "outrider/speculation/triton_"
_TRAINED = "outrider/train/published/"
_PUBLISHED = ("drafter/published/", "drafter/methods/published", "outrider/models/published_drafters.py")
_ATTACHED = ("coordinator/attachment/", "outrider/engine/vllm/attached/")  # guesses for a server that is not ours
_TARGETS = ("coordinator/workers/targets/", "outrider/launch/targets.py")  # several in one fleet
_PLACEMENT = "coordinator/placement/"
_AGENTS = "coordinator/api/http/agents/"
_KINDS = "coordinator/sessions/text_kinds/"
_MULTIPLEX = "outrider/multiplex/"
_STATES = "/hidden_states"  # of several layers: in each room, a folder or file of that name


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
    attached = sum(source.lines for source in product if source.path.startswith(_ATTACHED))
    adapter = sum(source.lines for source in product if source.path.startswith(_VLLM))
    adapter -= sum(source.lines for source in product if source.path.startswith(_ATTACHED[1]))
    kernels = sum(source.lines for source in product if source.path.startswith(_KERNELS))
    published = sum(source.lines for source in product if source.path.startswith(_PUBLISHED))
    trained = sum(source.lines for source in product if source.path.startswith(_TRAINED))
    agents = sum(source.lines for source in product if source.path.startswith(_AGENTS))
    targets = sum(source.lines for source in product if source.path.startswith(_TARGETS))
    states = sum(source.lines for source in product if _STATES in source.path)
    kinds = sum(source.lines for source in product if source.path.startswith(_KINDS))
    lines = layout.lines_of(product, measured) - attached - adapter - kernels - published - agents - states - kinds
    multiplex = sum(source.lines for source in product if source.path.startswith(_MULTIPLEX))
    placement = sum(source.lines for source in product if source.path.startswith(_PLACEMENT))
    lines -= targets + trained + multiplex + placement
    beside = layout.lines_of(product, [_NOT_THE_PRODUCT])
    full = [f"{folder}: {number} modules" for number, folder in folders]
    yield Measure("modules in a folder, at most", folders[0][0], 14, full)
    yield _count(f"files over {layout.LONG_FILE_LINES} lines", layout.long_files(product), 0)
    yield _count(f"classes over {layout.BIG_CLASS_METHODS} methods", layout.big_classes(product), 8)
    yield _count("class names used more than once", layout.repeated_class_names(product), 0)
    yield Measure("product lines", lines, 23_500, note=f"and {beside} in {_NOT_THE_PRODUCT}", step=500)
    yield Measure("lines of the vLLM adapter", adapter, 1_500)
    yield Measure("lines of the attached mode", attached, 900)
    yield Measure("lines of published drafters", published, 2_120)
    yield Measure("lines of training in published formats", trained, 420)
    yield Measure("lines of the agents' API", agents, 1_640)
    yield Measure("lines of placement", placement, 160)
    yield Measure("lines of several targets", targets, 300)
    yield Measure("lines of multiplexed streams", multiplex, 750)
    yield Measure("lines of hidden states", states, 1_100)
    yield Measure("lines of Triton kernels", kernels, 300)
    yield Measure("lines of kinds of text", kinds, 170)


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
