"""EAGLE: a decoder layer that continues from the target's own hidden states, which arrive with each commit.

The layer's input at a position is a hidden state and the token after it. The KV cache keeps positions with the target's
states. At later positions the layer's own output states stand in; they are recomputed when the target's states arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from drafter.artifacts import read_trained
from drafter.draft_sampling import add_choices, draws_plainly, next_token
from drafter.hidden_states.received import WHOLE_PROMPT, ReceivedStates, evicted
from drafter.interface import DraftRequest
from drafter.lockstep import run_in_lockstep
from drafter.methods.kernel_chains import KernelChains
from drafter.methods.registry import drafter
from drafter.published.row_engine import RowEngine
from drafter.tree_builder import TreeBuilder
from outrider.engine import Engine, SessionTokens
from outrider.engine.loading.loader import warm_up
from outrider.engine.loading.options import EngineOptions, pick_device, pick_dtype
from outrider.engine.loading.selection import make_engine
from outrider.engine.native import NativeEngine
from outrider.engine.native.build import find_library
from outrider.engine.transformers.attention import NAME as RAGGED_ATTENTION
from outrider.protocol.errors import Overloaded, StartupError
from outrider.protocol.fleet import ModelInfo
from outrider.protocol.speculation import ROOT, Distribution, Guess
from outrider.protocol.vocabulary import Vocabulary
from outrider.settings.drafter import DrafterSettings
from outrider.train.artifacts.eagle import METHOD, Eagle


@dataclass(frozen=True, slots=True)
class _LayerOutput:
    """Output for one token: the predicted state, and the logits of the next token."""

    state: torch.Tensor  # [1, hidden]
    logits: torch.Tensor  # [1, ids]


@dataclass(slots=True)
class _EagleSession(ReceivedStates):
    """Outputs of the layer for a session."""

    window: int = 16  # a trained eagle guesses no better from more of a prompt
    path: list[int] = field(default_factory=list)  # tokens cached after them, with predicted states
    outputs: list[_LayerOutput] = field(default_factory=list)  # at the last of `num_cached`, then along `path`
    tree_outputs: dict[tuple[int, ...], _LayerOutput] = field(default_factory=dict)  # by path from `tree_root`
    tree_root: tuple[int, int] = (0, 0)  # committed tokens, cached positions with the target's states


# Yields the tokens to compute, receives the layer's output, returns the draft.
DraftSteps = Generator[SessionTokens, _LayerOutput, Guess]
_FOLLOWED = 16  # tokens after the target's last states, at most: after a rest there are hundreds
_Outputs = dict[int, _LayerOutput]  # by node of a tree


class EagleDrafter:
    """Drafter that batches the layer's steps over all sessions."""

    needs_hidden_states = True

    def __init__(self, eagle: Eagle | RowEngine, engine: Engine | RowEngine, info: ModelInfo, candidates: int) -> None:
        self.info = info
        self.vocabulary: Vocabulary | None = None  # bound to one target instead: ModelInfo.target_digest
        self.vocab_limit = len(eagle.embeddings)
        self._eagle = eagle
        self._engine = engine
        self._candidates = candidates
        self._opened = _EagleSession if isinstance(eagle, Eagle) else partial(_EagleSession, WHOLE_PROMPT)
        self._sessions: dict[str, _EagleSession] = {}  # least recently drafted first
        self._chains: KernelChains | None = None
        if isinstance(engine, NativeEngine) and isinstance(eagle, Eagle):
            self._chains = KernelChains(eagle, engine)

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Guess]:
        """Step all sessions together until each has its draft."""
        drafts = run_in_lockstep({it.session: self._steps(it, len(requests) == 1) for it in requests}, self._compute)
        return [drafts.get(request.session) or request.chain(done=True) for request in requests]

    def forget(self, session: str) -> None:
        self._engine.free(session)
        self._sessions.pop(session, None)

    def _compute(self, batch: dict[str, SessionTokens]) -> dict[str, _LayerOutput]:
        """Run the layer. With a full KV cache, a session is evicted, and starts again with its next hidden states."""
        while batch:
            try:
                computed = self._engine.extend(list(batch.values()))
            except Overloaded:
                self.forget(evicted(self._sessions, batch))
                continue
            outputs = zip(computed.hidden_states, computed.logits, strict=True)
            return {
                session: _LayerOutput(states.clone(), logits.clone())
                for session, (states, logits) in zip(batch, outputs, strict=True)
            }
        return {}

    def _steps(self, request: DraftRequest, alone: bool) -> DraftSteps:
        state = self._sessions.pop(request.session, None) or self._opened()
        self._sessions[request.session] = state  # now the most recently drafted
        for hidden_states in request.hidden_states:
            if not state.add(hidden_states):
                self._engine.free(request.session)
        at_once = alone and request.branches == 1 and request.room and draws_plainly(request)
        chains = self._chains if at_once else None
        if chains and (drafted := self._draft_at_once(request, state, chains)):
            return drafted
        yield from self._compute_new(request, state)
        if state.new_states:
            return request.chain()  # the other sessions come first
        if not state.outputs or request.committed - state.path_start > _FOLLOWED:
            return request.chain(done=True)  # no hidden states of the target, or none of late
        if request.branches > 1:
            return (yield from self._draft_tree(request, state))
        if chains:
            yield from self._compute_path(request, state, request.tokens[state.path_start : -1])
            if drafted := self._draft_at_once(request, state, chains):
                return drafted
        return (yield from self._draft_chain(request, state))

    def _compute_new(self, request: DraftRequest, state: _EagleSession) -> Generator[SessionTokens, _LayerOutput, None]:
        """Compute the positions of the target's new states, in place of the predicted states there."""
        if state.new_states:
            state.path, state.outputs = [], []
            self._engine.truncate(request.session, state.num_cached)
            part = state.next_states()
            tokens = request.tokens[state.path_start : state.path_start + len(part)]
            output = yield self._input(request.session, part, tokens)
            state.cached(len(part))
            state.outputs = [output]

    def _compute_path(
        self, request: DraftRequest, state: _EagleSession, tokens: Sequence[int]
    ) -> Generator[SessionTokens, _LayerOutput, None]:
        """Compute `tokens` after the target's states, each with the state predicted for the one before it."""
        pairs = enumerate(zip(state.path, tokens, strict=False))
        same = next((i for i, (cached, token) in pairs if cached != token), len(tokens))
        if same < len(state.path):
            del state.path[same:], state.outputs[same + 1 :]
            self._engine.truncate(request.session, state.num_cached + same)
        for token in tokens[len(state.path) :]:
            output = yield self._input(request.session, state.outputs[-1].state, [token])
            state.path.append(token)
            state.outputs.append(output)

    def _draft_at_once(self, request: DraftRequest, state: _EagleSession, chains: KernelChains) -> Guess | None:
        """Draft a chain in one call of the kernels, after new states or after one more token; None: there is more."""
        tokens = request.tokens[state.path_start :]
        after_states = bool(state.new_states)
        if after_states:
            states = state.next_states()
            if len(tokens) != len(states):  # there are further ones, or more than one pass takes
                return None
            state.path, state.outputs = [], []
            self._engine.truncate(request.session, state.num_cached)
        elif not (state.outputs and tokens and list(tokens[:-1]) == state.path):
            return None
        else:
            tokens, states = tokens[-1:], state.outputs[-1].state
        try:
            drafted, hidden, logits = chains.extend(request, states, tokens)
        except Overloaded:
            return None
        if after_states:
            state.cached(len(tokens))
        else:
            state.path += tokens
        state.path += drafted[:-1]
        state.outputs += [_LayerOutput(hidden[i : i + 1], logits[i : i + 1]) for i in range(len(hidden))]
        return request.chain(drafted, done=len(drafted) < request.max_new_tokens)

    def _draft_chain(self, request: DraftRequest, state: _EagleSession) -> DraftSteps:
        tokens = list(request.tokens)
        probs: list[Distribution] = []
        for _ in range(request.room):
            yield from self._compute_path(request, state, tokens[state.path_start :])
            choice = next_token(request, state.outputs[-1].logits, tokens, self._candidates, self._eagle.ids)
            if choice is None:
                break
            tokens.append(choice[0])
            probs += choice[1]
        drafted = tokens[len(request.tokens) :]
        return request.chain(drafted, probs, done=len(drafted) < request.max_new_tokens)

    def _draft_tree(self, request: DraftRequest, state: _EagleSession) -> DraftSteps:
        """Draft a tree, level by level; computing all of it anew costs little more than a token. The KV cache stays."""
        yield from self._compute_path(request, state, request.tokens[state.path_start : request.committed])
        num_cached = state.num_cached + len(state.path)
        builder = TreeBuilder(request)
        outputs = {ROOT: state.outputs[-1]} | self._known_outputs(request, state, builder)
        computed = [node for node in outputs if node != ROOT]
        logits = torch.cat([output.logits for output in outputs.values()])
        add_choices(request, builder, list(outputs), logits, self._eagle.ids)
        for _ in range(request.max_new_tokens):
            new = [n for n in builder.expandable_nodes() if n not in outputs and builder.parents[n] in outputs]
            if new:
                computed += new
                output = yield self._tree_input(request.session, builder, computed, outputs, len(new))
                self._engine.truncate(request.session, num_cached)
                for i, node in enumerate(new):
                    outputs[node] = _LayerOutput(output.state[i : i + 1], output.logits[i : i + 1])
                    state.tree_outputs[builder.path(node)] = outputs[node]
                add_choices(request, builder, new, output.logits, self._eagle.ids)
            added = [builder.add() for _ in range(builder.level_budget)]
            if added[0] is None:
                return builder.guess(done=True)
        return builder.guess()

    def _known_outputs(self, request: DraftRequest, state: _EagleSession, builder: TreeBuilder) -> _Outputs:
        """Return the outputs for open guesses that were computed before from the same states of the target."""
        root = (request.committed, state.num_cached)
        if state.tree_root != root:
            state.tree_outputs, state.tree_root = {}, root
        paths = {node: builder.path(node) for node in range(len(builder.tokens))}
        return {node: state.tree_outputs[path] for node, path in paths.items() if path in state.tree_outputs}

    def _tree_input(
        self, session: str, builder: TreeBuilder, nodes: Sequence[int], outputs: _Outputs, num_new: int
    ) -> SessionTokens:
        """Return the layer's input for a tree, with outputs for the last `num_new` nodes."""
        index = {node: i for i, node in enumerate(nodes)}
        parents = [builder.parents[node] for node in nodes]
        states = torch.cat([outputs[parent].state for parent in parents])
        tokens = [builder.tokens[node] for node in nodes]
        return self._input(session, states, tokens, tuple(index.get(parent, -1) for parent in parents), num_new)

    def _input(
        self, session: str, states: torch.Tensor, tokens: Sequence[int], parents: Sequence[int] = (), outputs: int = 1
    ) -> SessionTokens:
        """Return the layer's input for tokens and the states before them, with outputs for the last `outputs`."""
        inputs = self._eagle.inputs(states, torch.tensor(tokens, device=self._eagle.embeddings.device))
        first = len(tokens) - outputs
        return SessionTokens(session, tokens, parents, first, first, inputs)


@drafter(METHOD)
def make(settings: DrafterSettings, progress: Callable[[str], None]) -> EagleDrafter:
    eagle, info = read_trained(settings, METHOD, Eagle.from_weights, progress)
    return EagleDrafter(eagle, engine_for(eagle, settings, progress), info, settings.draft_candidates)


def engine_for(eagle: Eagle, settings: DrafterSettings, progress: Callable[[str], None]) -> Engine:
    """Return a warmed-up engine for the layer alone; its weights are in bfloat16, on a CPU in four bits."""
    options = replace(EngineOptions.of(settings), prefix_tokens=0)  # its cache depends on states as well as tokens
    device = pick_device(options.device, options.engine)
    unset = (settings.dtype, settings.quantization) == ("auto", "none")
    on_cpu = unset and device.type == "cpu" and options.engine != "transformers"
    if on_cpu and not isinstance(find_library(), str):
        options = replace(options, quantization="int4")  # fewest bytes
    dtype = torch.bfloat16 if settings.dtype == "auto" else pick_dtype(settings.dtype, device)
    body = eagle.body.eval()
    for weight in body.parameters():  # not the buffers: rotation frequencies stay in float32
        weight.data = weight.data.to(dtype)
    body.set_attn_implementation(RAGGED_ATTENTION)
    info = ModelInfo("eagle", "", vocab_size=len(eagle.ids), context_length=eagle.shape.context)
    if options.engine == "cuda":
        raise StartupError.of("engine", "cuda", "auto, native or transformers", ": eagle has no CUDA graphs")
    if device.type == "cuda" and options.engine == "auto":
        options = replace(options, engine="transformers")
    engine = make_engine(body, info, options, progress)
    progress("warming up")
    warm_up(engine)
    return engine
