"""Words and sentences: how docstrings begin, words that are not used here, and how long sentences are."""

from __future__ import annotations

import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.shape.sources import ROOT, Source, definitions, generated_folders


def _listed(text: str) -> frozenset[str]:
    return frozenset(text.split())


# First words that make half a sentence, or a sentence about something that was not named.
_HALF = _listed("""
    what who whom whose which where when why how whether whatever whoever whichever wherever
    of for from to in into on onto at by with without as until till after before since while over under above below
    through around about against between among beside besides behind beyond per along within across
    because if unless so than that though although and or but lest
    it its this these those they he she ours mine yours somebody nobody anybody none
    not never now here there also only again already still once twice anew alive otherwise
""")
# "Known by id", "Copied page by page": a participle without what it belongs to.
_LOOSE_PARTICIPLE = re.compile(
    r"(\w+ed|made|taken|written|known|held|kept|given|seen|drawn|sent|read)\s+"
    r"(as|at|before|after|beside|bit|by|for|from|in|once|out|page|through|to|together|until|when|where|while|with)\b"
)
# "Keeps a worker registered": a verb that is not imperative. ruff sees it in functions, not in classes and modules.
_THIRD_PERSON = _listed("""
    accepts adds answers asks begins brings builds calls carries changes checks chooses closes collects counts decides
    does draws drives drops ends finds follows gets gives goes grows guards has hears holds is keeps knows lets limits
    listens loads looks makes matches measures opens owns puts raises reads refuses registers remembers reports runs
    says sees sends serves sets shows speaks stands starts stops takes tells translates tries turns waits watches works
    writes
""")
_PARAMETER = re.compile(r"`[a-z_][a-z0-9_]*`:")

_BANNED = re.compile(
    r"\b(?:whoever|whomever|whosoever|whomsoever|somebody|nobody|anybody|lest|thereof|hence|whence|thence|henceforth|"
    r"aught|naught|nought|whilst|amongst|betwixt|therein|thereby|wherein|whereby|whereupon|whereof|thereupon|hither|"
    r"thither|hereby|herein|forthwith|ere|albeit|unto|of no use|made for it|by and by|none the wiser|"
    r"in vain)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"```.*?```|~~~.*?~~~|<!--.*?-->", re.DOTALL)
_INLINE_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
_NO_PROSE = re.compile(r"\s*(?:#|\||<|\[[^\]]+\]:|=====|-----|>>>)")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"”*_]*\s+(?=[\"“(*_`]*[A-ZΓ0-9γ`])")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|approx|no|fig|arXiv)\.$", re.IGNORECASE)
_WORD = re.compile(r"\w[\w'’.,/:+-]*")


@dataclass(frozen=True)
class Docstring:
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text.partition(chr(10))[0]}"


def docstrings(source: Source) -> Iterator[Docstring]:
    """Yield the docstrings of a module, of its classes and of its functions."""
    nodes: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]] = [
        (source.path, source.tree),
        *((str(found), found.node) for found in definitions(source)),
    ]
    for where, node in nodes:
        if text := ast.get_docstring(node):
            yield Docstring(where, text)


def is_half(text: str) -> bool:
    """Tell whether a docstring begins with half a sentence, as far as its first words show it."""
    if _PARAMETER.match(text):
        return True
    first = re.split(r"[\s,.:;]", text, maxsplit=1)[0].strip("`\"'").lower()
    return first in _HALF or first in _THIRD_PERSON or bool(_LOOSE_PARTICIPLE.match(text.lower()))


def half_docstrings(sources: Sequence[Source]) -> list[str]:
    """Return the docstrings that begin with half a sentence."""
    return [str(found) for source in sources for found in docstrings(source) if is_half(found.text)]


def refused_by_ruff(folders: Sequence[str]) -> list[str]:
    """Return the docstrings of functions that do not begin with an imperative (D401), and those with "This" (D404)."""
    ruff = str(Path(sys.executable).with_name("ruff"))
    command = [ruff, "check", "--isolated", "--select", "D401,D404", "--output-format", "json", "--exit-zero", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    generated = {str(folder) for folder in generated_folders()}
    return [
        f"{Path(found['filename']).relative_to(ROOT)}:{found['location']['row']} {found['code']} {found['message']}"
        for found in json.loads(done.stdout)
        if str(Path(found["filename"]).parent) not in generated
    ]


def banned_words(text: str) -> list[str]:
    return [found.group().lower() for found in _BANNED.finditer(text)]


def banned_in(sources: Iterable[Source]) -> list[str]:
    """Return the banned words in what people read: comments, docstrings and strings, or a document without its code."""
    return [
        f"{source.path}:{line}: {word}"
        for source in sources
        for line, text in _readable(source)
        for word in banned_words(text)
    ]


def _readable(source: Source) -> Iterator[tuple[int, str]]:
    if source.path.endswith(".py"):
        yield from _comments_and_strings(source)
    elif source.path.endswith(".md"):
        yield from enumerate(_without_code(source.text).splitlines(), start=1)
    else:
        for number, line in enumerate(source.text.splitlines(), start=1):
            yield number, line.partition("//")[2]


def _comments_and_strings(source: Source) -> Iterator[tuple[int, str]]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _without_code(text: str) -> str:
    """Blank code, keeping the lines where they are."""
    blocks = _CODE.sub(lambda block: "\n" * block.group().count("\n"), text)
    return _INLINE_CODE.sub("code", blocks)


def sentences(text: str) -> list[str]:
    """Return the sentences of a text in Markdown, without headings, tables and code.

    A list item and a paragraph end a sentence, and so do a full stop, a question mark and an exclamation mark.
    """
    return [sentence for paragraph in _paragraphs(text) for sentence in _split(paragraph)]


def _paragraphs(text: str) -> list[str]:
    plain = _LINK.sub(r"\1", _without_code(text))
    paragraphs = [""]
    for line in plain.splitlines():
        if not line.strip() or _NO_PROSE.match(line):
            paragraphs.append("")
        elif item := _LIST_ITEM.match(line):
            paragraphs.append(line[item.end() :])
        else:
            paragraphs[-1] = f"{paragraphs[-1]} {line.strip()}"
    return [paragraph.strip() for paragraph in paragraphs if paragraph.strip()]


def _split(paragraph: str) -> list[str]:
    found: list[str] = []
    for part in _SENTENCE_END.split(paragraph):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] = f"{found[-1]} {part}"
        else:
            found.append(part)
    return found


def words(sentence: str) -> int:
    return len(_WORD.findall(sentence))


def median_words(texts: Iterable[str]) -> float:
    """Return the median length of a sentence, in words; sentences of one or two words are labels and do not count."""
    lengths = [length for text in texts for sentence in sentences(text) if (length := words(sentence)) > 2]
    return statistics.median(lengths)
