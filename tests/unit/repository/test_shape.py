"""The measures of the code's shape, on small pieces of code and text."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
import threading
from pathlib import Path
from types import CodeType

import grimp
import pytest

from tests.shape import guesses, imports, layout, measures, params, profiled, rounds, sentences, sources
from tests.shape.measures import Measure
from tests.shape.sources import ROOT, Source


def module(text: str, path: str = "house/room.py") -> Source:
    return Source(path, textwrap.dedent(text).strip() + "\n")


# Guesses.


def test_a_type_with_tokens_and_what_they_hang_from_carries_a_guess() -> None:
    found = guesses.guess_types(
        [
            module("""
                @dataclass(frozen=True)
                class Draft:
                    tokens: tuple[int, ...]
                    parents: tuple[int, ...]

                @dataclass
                class Held:
                    draft: Draft | None

                class Owner:
                    draft: Draft

                @dataclass
                class Verdict:
                    tokens: list[int]
                    accepted: int

                @dataclass
                class ProposedChain:
                    tokens: tuple[int, ...]

                class Proposer:
                    tokens: tuple[int, ...]

                class Tree:
                    def __init__(self) -> None:
                        self.tokens: list[int] = []
                        self._children = {}
            """),
            Source("a.proto", "message Guess { repeated uint32 tokens = 1; // of one\n uint32 parent = 2 [a=b]; }"),
            Source("b.proto", "message Reply { oneof message { Guess guess = 1; Opened opened = 2; } }"),
        ]
    )
    assert {line.rpartition(" ")[2] for line in found} == {"Guess", "Reply", "Draft", "Held", "ProposedChain", "Tree"}


def walkers(body: str) -> list[str]:
    return guesses.parent_walkers([module("def walk():\n" + textwrap.indent(body, "  "))]).get("house/room.py", [])


@pytest.mark.parametrize(
    "body",
    [
        "for parent in parents:\n  depths.append(depths[parent] + 1)",
        "for row, parent in pairs:\n  sees[row] |= sees[parent]",
        "for node, parent in pairs:\n  path = (*paths[parent], 1)\n  paths[node] = path",
        "while row:\n  row = self.parents[row - 1]",
        "while node is not None:\n  node = node.parent",
        "while (node := node.parent) is not None: ...",
        "for i in it:\n  places.append(put(places[guess.parents[i] if guess.parents else i]))",
    ],
)
def test_finding_paths_from_parents_is_seen(body: str) -> None:
    assert walkers(body) == ["walk:1"]


@pytest.mark.parametrize(
    "body",
    [
        "folder = path.parent",
        "root = file.parents[1]",
        "use(node.parent, states[parents[node]])",
        "rows.append(index[parent])",
        "parents = tuple(parents)",
        "def inner():\n  while row:\n    row = parents[row]",
    ],
)
def test_passing_parents_on_is_not_finding_paths(body: str) -> None:
    assert "walk:1" not in walkers(body)


# Sampling parameters.

_FIELDS = ("temperature", "top_k", "top_p", "seed", "max_tokens", "stop")
_CONTRACT = Source("a.proto", "message SamplingParams {" + "".join(f"uint32 {name} = 1;" for name in _FIELDS) + "}")
_PARAMS = "\n".join(["from house.v1 import common_pb2 as common", "class Params:", *(f"  {n}: int" for n in _FIELDS)])


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("def f(p: Params) -> common.SamplingParams: ...", "Params → .SamplingParams"),
        ("def f(p: common.SamplingParams) -> Params: ...", ".SamplingParams → Params"),
        ("class Body(Params): ...\ndef f(b: Body | None) -> Params: ...", "Body → Params"),
        ("def f(a):\n  return Params(temperature=a, top_k=a, top_p=a, seed=a, stop=a)", "one by one → Params"),
        ("class R:\n  params: Params\n  def f(self) -> str: return dump(self.params)", "R → text or a mapping"),
        (
            "class R:\n  params: Params\n  @classmethod\n  def f(cls, t: str | bytes) -> R: return cls(t['params'])",
            "text or a mapping → R",
        ),
    ],
)
def test_conversions_of_sampling_parameters_are_seen(text: str, how: str) -> None:
    (found,) = params.conversions([Source("house/room.py", f"{_PARAMS}\n{text}\n"), _CONTRACT])
    assert found.endswith(f"f: {how}")


@pytest.mark.parametrize(
    "text",
    [
        "def f(p: Params) -> Params: ...",
        "def f(p: Params) -> str: ...",
        "def f(a):\n  return Params(temperature=a)",
        "def f(a):\n  return other(temperature=a, top_k=a, top_p=a, seed=a, stop=a)",
        "class R:\n  params: Params\n  def f(self) -> str: return self.name",
    ],
)
def test_using_sampling_parameters_converts_nothing(text: str) -> None:
    assert params.conversions([Source("house/room.py", f"{_PARAMS}\n{text}\n"), _CONTRACT]) == []


# Layout.


def test_folders_files_and_lines() -> None:
    files = [module("x = 1", f"house/{name}.py") for name in "abc"]
    files.append(Source("house/attic/d.py", "\n" * (layout.LONG_FILE_LINES + 1)))
    assert layout.modules_by_folder(files) == [(3, "house"), (1, "house/attic")]
    assert layout.long_files(files) == ["house/attic/d.py: 401 lines"]
    assert layout.lines_of(files, ["house"]) == 3 + 401
    assert layout.lines_of(files, ["shed"]) == 0


def test_methods_are_counted_with_properties_and_without_what_lies_within_them() -> None:
    methods = "\n".join(f"  def m{i}(self):\n    def inner(): ..." for i in range(layout.BIG_CLASS_METHODS))
    source = module(f"class Even:\n{methods}\nclass Big:\n{methods}\n  @property\n  def more(self): ...")
    (found,) = layout.big_classes([source])
    assert found.endswith(" Big: 16 methods")


def test_class_names_that_two_modules_have() -> None:
    files = [module("class A: ...\nclass B: ...", "a.py"), module("class A: ...\nclass B: ...", "b.py")]
    assert layout.repeated_class_names(files, shared={"B"}) == ["A: a.py, b.py"]


# Imports.


def test_lazy_and_relative_imports_are_imports() -> None:
    files = [
        module("from . import beside\nimport house.cellar.wine", "house/__init__.py"),
        module("def f():\n  from house.cellar import wine", "house/beside.py"),
        module("", "house/cellar/__init__.py"),
        module("from ..beside import f\nimportlib.import_module('house')", "house/cellar/wine.py"),
    ]
    assert imports.imports(files) == {
        "house": {"house.beside", "house.cellar.wine"},
        "house.beside": {"house.cellar.wine"},
        "house.cellar": set(),
        "house.cellar.wine": {"house.beside", "house"},
    }


def test_cycles_are_found_once_each() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": ["e"], "e": ["d"], "f": ["a", "f"]}
    assert imports.cycles(graph) == [["a", "b", "c"], ["d", "e"]]


def test_packages_that_import_each_other_are_a_cycle_without_one_of_modules() -> None:
    graph = {"h.a.x": ["h.b.x"], "h.b.y": ["h.a.y"], "h.a.y": [], "h.b.x": [], "h": ["h.a.x"]}
    assert imports.cycles(graph) == []
    assert imports.package_cycles(graph) == [["h.a", "h.b"]]


def test_no_import_that_grimp_finds_is_missing() -> None:
    found = imports.imports(sources.product())
    graph = grimp.build_graph(*sources.packages(), cache_dir=None)
    known = set(found)
    missing = {
        (importer, other)
        for importer in known & graph.modules
        for other in graph.find_modules_directly_imported_by(importer) & known - found[importer]
    }
    assert missing == set()


# Sentences.


@pytest.mark.parametrize(
    "text",
    [
        "Whether it holds.",
        "Of a single choice.",
        "What each token adds.",
        "Who may call what: the interceptor.",
        "How long it takes.",
        "Where a call comes from.",
        "Which rows may go.",
        "When a stream breaks.",
        "To be called before.",
        "`doors`: the keys of each service.",
        "Known by id and by address.",
        "Copied page by page.",
        "Keeps a worker registered.",
        "It ends here.",
        "Whatever comes.",
    ],
)
def test_half_sentences_are_seen(text: str) -> None:
    assert sentences.is_half(text)


@pytest.mark.parametrize(
    "text",
    [
        "Return the first validation error.",
        "The loop of one session.",
        "Tokens of a batch.",
        "Keys given as files.",
        "Expected tokens per second.",
        "Accepted tokens by position.",
        "`python -m verifier`: serve a target model.",
        "Keep a worker registered.",
        "Settings of the verifier.",
    ],
)
def test_imperatives_and_nouns_are_whole(text: str) -> None:
    assert not sentences.is_half(text)


def test_docstrings_of_all_kinds_are_read() -> None:
    source = module(
        '"""Whose."""\nclass A:\n  """Of a."""\n  def f(self):\n    """Fine word."""\n  async def g(self): ...'
    )
    assert len(sentences.half_docstrings([source])) == 2


def test_ruff_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "ROOT", tmp_path)
    (tmp_path / "house").mkdir()
    text = 'def f():\n    """Returns it."""\n\n\ndef g():\n    """This is it."""\n\n\ndef h():\n    """Return it."""\n'
    (tmp_path / "house" / "room.py").write_text(text)
    assert [line.rpartition(" ")[0].split()[:2] for line in sentences.refused_by_ruff(["house"])] == [
        ["house/room.py:2", "D401"],
        ["house/room.py:6", "D401"],
        ["house/room.py:6", "D404"],
    ]


def test_banned_words_are_found_in_what_people_read() -> None:
    source = module("""
        nobody = somebody(1)  # lest it fails
        text = "Whoever comes"
        f"{nobody} is of no use"
    """)
    found = sentences.banned_in([source])
    assert sorted(line.partition(":")[2] for line in found) == ["1: lest", "2: whoever", "3: of no use"]
    document = Source("a.md", "Then nobody\n```\nwhoever\n```\nuses `hence` whence.\n")
    assert sentences.banned_in([document]) == ["a.md:1: nobody", "a.md:5: whence"]
    proto = Source("a.proto", "uint32 nobody = 1; // thereof")
    assert sentences.banned_in([proto]) == ["a.proto:1: thereof"]


def test_sentences_of_a_document() -> None:
    text = """
# A heading is no sentence

One goes over
two lines, e.g. Here. Another [has a link](http://x.y/z.z)! And `some.code()` too?

- An item without a full stop
- a second one
| a | table. Row |

```
Code. Is. Code.
```
"""
    assert sentences.sentences(text) == [
        "One goes over two lines, e.g. Here.",
        "Another has a link!",
        "And code too?",
        "An item without a full stop",
        "a second one",
    ]
    assert sentences.median_words([text]) == 4  # 7, 4, 3, 6, 3


# Rounds.


def test_a_function_of_the_round_runs_in_nearly_every_one() -> None:
    edges = [1000 * i for i in range(41)]
    every = [(1000 * i + 1, 0) for i in range(40)]
    burst = [(17_000 + i, 1) for i in range(200)]
    other_rounds = [(1000 * i + 1, 2) for i in range(0, 40, 2)]
    late_and_early = [(1000 * i + (990 if i % 2 else 1010), 3) for i in range(40)]
    outside = [(50_000 + i, 4) for i in range(100)]
    trace = rounds.Trace(
        ["every", "burst", "other", "jitter", "outside"], every + burst + other_rounds + late_and_early + outside
    )
    assert rounds.steady(trace, edges) == ["every", "jitter"]


async def _twice() -> None:
    await asyncio.sleep(0)


def _in_a_thread() -> list[int]:
    return [i + 1 for i in range(2)]


def test_the_recorder_sees_resumed_coroutines_threads_and_only_the_files_asked_for(tmp_path: Path) -> None:
    runs: list[tuple[int, CodeType]] = []
    record = profiled.recorder({__file__}, runs)
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        asyncio.run(_twice())
        thread = threading.Thread(target=_in_a_thread)
        thread.start()
        thread.join()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert [code.co_name for _, code in runs] == ["_twice", "_twice", "_in_a_thread"]
    assert [at for at, _ in runs] == sorted(at for at, _ in runs)
    profiled.write(tmp_path / "runs.json", runs)
    trace = rounds.Trace(**json.loads((tmp_path / "runs.json").read_text()))
    here = str(Path(__file__).relative_to(ROOT))
    assert trace.functions == [f"{here} _twice", f"{here} _in_a_thread"]
    assert [function for _, function in trace.runs] == [0, 0, 1]


# Ceilings.


def test_ceilings_only_go_down_and_not_below_the_target() -> None:
    measured = [Measure("a", 5, 3), Measure("b", 2, 3), Measure("c", 9, 3), Measure("d", 910, 300, step=500)]
    bounds = {"a": 7.0, "b": 4.0, "c": 8.0, "d": 1000.0}
    assert measures.lowered(measured, bounds) == {"a": 5, "b": 3}
    assert measures.over(measured, bounds) == ["c: 9, at most 8"]
