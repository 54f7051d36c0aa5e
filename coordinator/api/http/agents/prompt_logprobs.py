"""Log probabilities of a prompt's own tokens, for `prompt_logprobs`, and for `echo` with `logprobs`.

A session writes the prompt: its grammar allows the prompt's tokens and no others. Log probabilities are those before
the grammar. An end token ends an output, so the rest of the prompt is written by another session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from coordinator.api.http.answer import progress, start_answer
from coordinator.api.http.bodies import CompletionBody, GenerationBody
from coordinator.api.preprocess import admission
from coordinator.persistence.session_record import SessionRequest
from coordinator.sessions.output import Token
from coordinator.sessions.session_manager import SessionManager
from coordinator.workers.target import Target
from outrider.protocol.errors import InvalidRequest, PeerLost
from outrider.protocol.sampling_params import Grammar, SamplingParams
from outrider.protocol.speculation import TokenKind
from outrider.speculation.grammar import ONE_TEXT

_MOST = 4_000  # tokens that one grammar writes
_MORE_RUNS = 256  # sessions of a request's prompts beyond the first one of each


async def echoed_prompts(
    body: GenerationBody, sessions: SessionManager, requests: Sequence[SessionRequest], target: Target, key: str
) -> dict[int, list[Token]]:
    """Return the tokens of each prompt that the answer tells of, by its number; without log probabilities as one."""
    requests, most = requests[:: body.choices], body.prompt_logprobs
    texts = [""] * len(requests)
    if isinstance(body, CompletionBody) and body.echo:
        texts = [it if isinstance(it, str) else target.decode(it) for it in body.prompts]  # some may have equal tokens
        most = max((it for it in (most, body.logprobs) if it is not None), default=None)
    if most is None:
        return {number: [Token(0, TokenKind.PLAIN, text, None)] for number, text in enumerate(texts) if text}
    # Equal words may be another prompt later, as with a template that tells the day: it is compared, not what was sent.
    scored = [replace(each, params=replace(each.params, logprobs=most), sent="") for each in requests]
    distinct = {(each.prompt, text): each for each, text in zip(scored, texts, strict=True)}
    runs = sum(len([*_runs(prompt, target.info.eos_token_ids)]) for prompt, _ in distinct)
    if runs > (limit := len(distinct) + _MORE_RUNS):
        with admission(sessions.metrics):
            raise InvalidRequest.of("prompt", f"{runs} parts of {_MOST} tokens or to an end token", f"at most {limit}")
    written = {
        one: await _write(sessions, request, one[1], target, key and f"{key}\nprompt {number}")
        for number, (one, request) in enumerate(distinct.items())
    }
    return {number: written[each.prompt, text] for number, (each, text) in enumerate(zip(scored, texts, strict=True))}


async def _write(sessions: SessionManager, request: SessionRequest, sent: str, target: Target, key: str) -> list[Token]:
    """Return the tokens of a prompt. Nothing comes before the first one, so it has no log probabilities."""
    prompt = request.prompt
    tokens = [Token(prompt[0], TokenKind.PLAIN, target.decode(prompt[:1]), None)]
    for start, end in _runs(prompt, target.info.eos_token_ids):
        params = replace(_forced(prompt[start:end], target), max_tokens=end - start, logprobs=request.params.logprobs)
        part = replace(request, prompt=prompt[:start], params=params)
        async with (
            start_answer(sessions, [part], target, key and f"{key}/{start}") as running,
            contextlib.aclosing(progress(running)) as updates,
        ):
            async for _, new in updates:
                tokens += new
            tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + running[0].output.rest.text)
    if tuple(token.token for token in tokens) != prompt:
        raise PeerLost("the verifier did not repeat the prompt")
    at, added = 0, target.tokenizer.added_tokens_decoder
    for index, token in enumerate(tokens):  # special ones have no text in answers, but may have it in what was sent
        mark = getattr(added.get(token.token), "content", "")
        text = token.text or mark * sent.startswith(mark, at)
        tokens[index] = token._replace(text=sent[at : at + len(text)])
        at += len(text)
    tokens[-1] = tokens[-1]._replace(text=tokens[-1].text + sent[at:])  # the tokenizer may have changed what was sent
    return tokens


def _runs(prompt: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the beginning and end of what one session writes: up to an end token, and with it."""
    start = 1
    for at in range(2, len(prompt) + 1):
        if at == len(prompt) or prompt[at - 1] in ends or at - start == _MOST:
            yield start, at
            start = at


def _forced(tokens: Sequence[int], target: Target) -> SamplingParams:
    """Return parameters with which these tokens, and no others, are written. The last one may be an end token."""
    ends = tokens[-1] in target.info.eos_token_ids
    text = ONE_TEXT + "]> <[".join(map(str, tokens[: len(tokens) - ends])) + "]>"
    # Where nothing could follow a text, the output would end without its end token.
    grammar = Grammar(lark=text.replace("<[]>", "") + ' "x"?' * ends)
    bias = {tokens[-1]: 100.0} if ends else {}
    return SamplingParams(temperature=0, seed=0, ignore_eos=not ends, grammar=grammar, logit_bias=bias)
