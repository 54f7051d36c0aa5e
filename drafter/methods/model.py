"""A small causal LM with the target's vocabulary, all sessions in one forward pass.

A chain grows by one token per step, a tree by about one level. The new nodes of a tree are computed together with the
paths that lead to them, which costs little more than one token, and nothing of the tree stays in the KV cache.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
import torch

from drafter.draft_sampling import next_token, token_choices
from drafter.interface import DraftRequest
from drafter.methods.registry import drafter
from drafter.tree_builder import Choice, TreeBuilder
from outrider.engine import SessionTokens
from outrider.engine.loading.loader import LoadedModel, load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.errors import Overloaded, StartupError
from outrider.protocol.speculation import ROOT, Guess, path_to
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts import card as cards

log = structlog.get_logger(__name__)

_PREFILL_TOKENS = 512
_TELL_S = 10.0  # from one line about a full KV cache to the next: there may be one a step


@dataclass(slots=True)
class _KnownChoices:
    """Choices after a session's open guesses, by the guessed tokens; they stay valid whatever else is guessed."""

    committed: int
    branches: int
    choices: dict[tuple[int, ...], list[Choice]] = field(default_factory=dict)

    def advance(self, request: DraftRequest) -> None:
        """Drop the choices that newly committed tokens contradict; shorten the other paths."""
        new = tuple(request.tokens[self.committed : request.committed])
        kept = self.choices if request.branches == self.branches else {}
        self.choices = {path[len(new) :]: choices for path, choices in kept.items() if path[: len(new)] == new}
        self.committed, self.branches = request.committed, request.branches


class ModelDrafter:
    """Drafter that runs a language model."""

    needs_hidden_states = False

    def __init__(
        self, loaded: LoadedModel, candidates: int, head_ids: Sequence[int] | None = None, target_digest: str = ""
    ) -> None:
        self._engine = engine = loaded.engine
        self.info = replace(engine.info, target_digest=target_digest)
        self._candidates = candidates
        # The token ids of the engine's logits, if they cover only part of the vocabulary.
        self._columns = None if head_ids is None else torch.tensor(head_ids, device=engine.device)
        self._cached: dict[str, list[int]] = {}  # least recently drafted first
        self._known: dict[str, _KnownChoices] = {}
        self._computed_nodes: dict[str, list[int]] = {}  # by session: open guesses that this step computes
        self.vocabulary: Vocabulary | None = loaded.vocabulary
        self._tell_at = 0.0  # of a full KV cache, again

    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        most = min(self.info.context_length, self._engine.capacity_tokens)  # a larger text would drive out all others
        runnable = [r for r in requests if max(len(r.tokens), r.committed + len(r.open_guess.tokens)) < most]
        results: dict[str, Guess] = {}
        while runnable:
            batch = [self._input(request) for request in runnable]
            try:
                computed = self._engine.extend(batch)
            except Overloaded:
                # First the least recently drafted session, unless it is in this batch: those come last.
                idle = len(self._cached) > len(runnable)
                self.forget(next(iter(self._cached)) if idle else runnable.pop().session)
                if not idle and time.monotonic() > self._tell_at:
                    self._tell_at = time.monotonic() + _TELL_S
                    log.warning("session not drafted for: KV cache full", others=len(runnable), see="--kv-tokens")
                continue
            for request, tokens, logits in zip(runnable, batch, computed.logits, strict=True):
                results[request.session] = self._result(request, tokens, logits)
            break
        return [results.get(request.session) or request.chain(done=True) for request in requests]

    def forget(self, session: str) -> None:
        self._engine.free(session)
        self._cached.pop(session, None)
        self._known.pop(session, None)
        self._computed_nodes.pop(session, None)

    def _input(self, request: DraftRequest) -> SessionTokens:
        """Roll the KV cache back to the common prefix; return the tokens to compute after it."""
        chain = request.tokens if request.branches == 1 else request.tokens[: request.committed]
        chain = self._known_ids(request, chain)
        cached = self._cached.pop(request.session, None)
        if cached is None:
            cached = list(chain[: self._engine.match_prefix(request.session, chain, request.cache_salt)])
        self._cached[request.session] = cached  # now the most recently drafted
        same = min(_common_length(cached, chain), len(chain) - 1)  # the last token is always computed for its logits
        del cached[same:]
        self._engine.truncate(request.session, same)
        new = chain[same : same + _PREFILL_TOKENS]
        whole = same + len(new) == len(chain)
        if whole and request.branches > 1:
            return self._tree_input(request, new)
        return SessionTokens(request.session, new, logits_from=len(new) - 1 if whole else len(new))

    def _known_ids(self, request: DraftRequest, tokens: Sequence[int]) -> Sequence[int]:
        """Return tokens with an end token for each that the target alone has, as those that were added for chats."""
        rows, ends = self.info.vocab_size, self.info.eos_token_ids
        if request.vocab_size <= rows or max(tokens, default=0) < rows:
            return tokens
        return [token if token < rows else min(ends, default=0) for token in tokens]

    def _tree_input(self, request: DraftRequest, new: Sequence[int]) -> SessionTokens:
        """Append the open guesses whose choices are unknown, with the paths that lead to them."""
        known = self._known.setdefault(request.session, _KnownChoices(request.committed, request.branches))
        known.advance(request)
        tokens, parents = self._known_ids(request, request.open_guess.tokens), request.open_guess.shape.parents
        unknown = [node for node, path in enumerate(request.open_guess.paths[1:]) if path not in known.choices]
        nodes = sorted({each for node in unknown for each in path_to(node, parents)})
        self._computed_nodes[request.session] = nodes
        last = len(new) - 1
        index = {node: at for at, node in enumerate(nodes, start=len(new))}
        return SessionTokens(
            request.session,
            [*new, *(tokens[node] for node in nodes)],
            (*range(-1, last), *(index.get(parents[node], last) for node in nodes)) if nodes else (),
            logits_from=last,
        )

    def _result(self, request: DraftRequest, computed: SessionTokens, logits: torch.Tensor) -> Guess:
        """Record what the step has cached; draft from its logits."""
        cached = self._cached[request.session]
        num_new = computed.logits_from + 1 if computed.parents else len(computed.tokens)
        if computed.parents:  # nothing of the tree stays
            self._engine.compact(request.session, len(cached), range(num_new))
        cached.extend(computed.tokens[:num_new])
        if not len(logits):
            return request.chain()  # the prefill is not complete: call again
        if request.branches > 1:
            return self._draft_level(request, logits)
        if not request.room:
            return request.chain(done=True)
        choice = next_token(request, logits, request.tokens, self._candidates, self._columns)
        return request.chain(done=True) if choice is None else request.chain([choice[0]], choice[1])

    def _draft_level(self, request: DraftRequest, logits: torch.Tensor) -> Guess:
        """Add the likeliest choices after all open guesses, up to a level's share of the budget, from these logits."""
        known = self._known[request.session].choices
        paths = request.open_guess.paths
        computed = [(), *(paths[node + 1] for node in self._computed_nodes.pop(request.session))]
        new = [row for row, path in enumerate(computed) if path not in known]
        if new:
            new_paths = [computed[row] for row in new]
            known.update(zip(new_paths, token_choices(request, logits[new], new_paths, self._columns), strict=True))
        builder = TreeBuilder(request)
        for node, path in enumerate(paths, start=ROOT):
            builder.add_choices(node, known[path])
        added = [builder.add() for _ in range(builder.level_budget)]
        return builder.guess(done=added[0] is None)


def _common_length(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the common prefix; usually all of the shorter one."""
    length = min(len(cached), len(tokens))
    if list(cached[:length]) == list(tokens[:length]):
        return length
    return next(i for i in range(length) if cached[i] != tokens[i])


@drafter("model")
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> ModelDrafter:
    return load(settings, progress)[0]


def load(settings: DrafterSettings, progress: Callable[[str], None]) -> tuple[ModelDrafter, LoadedModel]:
    """Load the model named by the settings, and build a drafter from it."""
    if not settings.model:
        message = f"kind {settings.kind} needs --model; of `up`, --drafter {settings.kind}:MODEL"
        raise StartupError(message, field="model", value="", limit="a directory, file or hub id")
    head_ids = read_vocabulary(settings.draft_vocabulary) if settings.draft_vocabulary else None
    loaded = load_model(settings.model, replace(EngineOptions.of(settings), head_ids=head_ids), progress)
    folder = Path(settings.model).expanduser()  # a shell leaves the ~ of model:~/folder
    target_digest = cards.read_card(folder).target_lineage if cards.is_trained(settings.model) else ""
    return ModelDrafter(loaded, settings.draft_candidates, head_ids, target_digest), loaded


def read_vocabulary(path: str) -> tuple[int, ...]:
    """Return the ids in a file, ascending."""
    try:
        content = json.loads(Path(path).read_text())
        ids = content["ids"] if isinstance(content, dict) else content
        if not all(type(token) is int for token in ids):
            raise ValueError("not all of them are whole numbers")
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"cannot read ids from {path}: {error}"
        raise StartupError(message, field="draft_vocabulary", value=path, limit="a JSON list of ids") from error
    return tuple(sorted(set(ids)))
