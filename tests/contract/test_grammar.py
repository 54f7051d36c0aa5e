"""Outputs of a given form over real sockets: always of that form, whoever drafts, and refused where they cannot be."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from dataclasses import dataclass
from typing import Any

import grpc
import httpx2 as httpx
import jsonschema
import pytest
import torch
from transformers import LlamaForCausalLM

from drafter.grammar import GrammarCursor
from outrider.cli import options
from outrider.client.sync import Client
from outrider.engine.loading.loader import LoadedModel
from outrider.models.tokenizer import tokenizer_json
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.sampling_params import Grammar as Form
from outrider.protocol.sampling_params import SamplingParams
from outrider.protocol.speculation import FinishReason
from outrider.speculation.grammar import GrammarCompiler
from outrider.v1 import common_pb2 as common
from outrider.v1 import verifier_pb2 as verify
from tests.cluster import Output, ask, client, failure, generate, generate_all
from tests.conftest import Models
from tests.contract.conftest import Greedy, House, after_joining, drafter_serving, opening, verifying
from tests.contract.test_drafter import drafting

pytestmark = pytest.mark.timeout(120)

PROMPT = "The contract says what each side may rely on. "
PATIENT_US = 1_000_000  # long enough for a guess to be there before the verifier goes on alone
VOCAB = 257
END = 256
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["name", "n", "ok"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["circle", "square"]},
            "at": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tag"}]},
        },
        "required": ["kind", "at", "next"],
        "additionalProperties": False,
        "$defs": {"tag": {"type": "object", "properties": {"id": {"const": 7}}, "required": ["id"]}},
    },
    "list": {"type": "array", "items": {"enum": ["x", "yy", "zzz"]}, "minItems": 3, "maxItems": 6},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}( [a-z]+)?$"},
}
FLAT = common.Grammar(json_schema=json.dumps(SCHEMAS["flat"]))


def requests(seeds: int = 3, *, max_tokens: int = 200, **more: Any) -> list[Any]:
    """Per schema and seed."""
    return [
        ask(
            PROMPT,
            seed=seed,
            max_tokens=max_tokens,
            grammar=common.Grammar(json_schema=json.dumps(schema)),
            patience_us=PATIENT_US if more.get("gamma") else 0,
            **more,
        )
        for schema in SCHEMAS.values()
        for seed in range(seeds)
    ]


def check(outputs: list[Output], loaded: LoadedModel) -> int:
    """Each is what its schema describes, or the beginning of such a text; how many are whole."""
    whole = 0
    for number, output in enumerate(outputs):
        schema = list(SCHEMAS.values())[number * len(SCHEMAS) // len(outputs)]
        if output.finish is FinishReason.STOP:
            whole += 1
            jsonschema.validate(json.loads(output.text), schema)
        else:
            assert output.finish is FinishReason.LENGTH
        tokens = [token for token in output.token_ids if token != END]
        params = SamplingParams(grammar=Form(json_schema=json.dumps(schema)))
        GrammarCompiler(lambda: tokenizer_json(loaded.tokenizer), [END]).compile(
            params, tokens
        )  # refuses what is no beginning
    return whole


WAYS = [{"gamma": 4, "drafter": "model"}, {"gamma": 4, "drafter": "ngram"}, {}]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_text_is_of_the_form_and_guesses_never_show(
    house: House, loaded: LoadedModel, temperature: float
) -> None:
    seeds = 3 if temperature else 1
    plain = await generate_all(house.coordinator, requests(seeds, gamma=0, temperature=temperature))
    assert check(plain, loaded) >= len(plain) / 2
    for way in WAYS:
        with after_joining(house.loaded, house.service):
            outputs = await generate_all(house.coordinator, requests(seeds, temperature=temperature, **way))
        for output, wanted in zip(outputs, plain, strict=True):
            assert (output.token_ids, output.text, output.finish) == (wanted.token_ids, wanted.text, wanted.finish)
        if way == WAYS[0]:
            assert sum(output.stats.accepted_tokens for output in outputs) > 10 * len(outputs)


@pytest.mark.parametrize("mode", [common.VERIFICATION_REJECTION, common.VERIFICATION_BLOCK])
@pytest.mark.parametrize("drafter", ["model", "ngram"])
async def test_modes_with_probabilities_write_the_form_too(
    house: House, loaded: LoadedModel, mode: int, drafter: str
) -> None:
    """Their law is tested in unit/test_exactness_of_grammar.py."""
    with after_joining(house.loaded, house.service):
        outputs = await generate_all(house.coordinator, requests(gamma=4, drafter=drafter, verification=mode))
    assert check(outputs, loaded) > len(outputs) / 2
    assert all(output.stats.drafter_losses == 0 for output in outputs)
    if drafter == "model":
        assert sum(output.stats.accepted_tokens for output in outputs) > 10 * len(outputs)


@pytest.mark.parametrize("max_tokens", [1, 7, 25])
async def test_max_tokens_cuts_a_text_that_could_go_on(house: House, loaded: LoadedModel, max_tokens: int) -> None:
    outputs = await generate_all(house.coordinator, requests(2, max_tokens=max_tokens, gamma=3))
    check(outputs, loaded)
    assert any(len(output.token_ids) == max_tokens for output in outputs)


async def test_a_form_for_which_the_system_allows_no_thread_may_be_asked_for_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the limit of a container. It was an internal error, which clients over gRPC do not retry."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    request = ask(PROMPT, max_tokens=20, grammar=common.Grammar(regex="[a-z]{7}"))
    body = {"prompt": PROMPT, "max_tokens": 20, "structured_outputs": {"regex": "[a-z]{7}"}}
    async with (
        client(house.coordinator) as stub,
        httpx.AsyncClient(base_url=f"http://{house.service.http_address}", timeout=30) as web,
    ):
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            status, _, typed = await failure(stub.Generate(request, timeout=20))
            assert (status, typed.code) == (grpc.StatusCode.UNAVAILABLE, "unavailable")
            answer = await web.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert re.fullmatch("[a-z]{7}", (await generate(stub, request)).text)


async def test_the_output_ends_with_the_form_whoever_ignores_end_tokens(house: House) -> None:
    for gamma in (0, 4):
        for text, grammar in (("abc", {"regex": "abc"}), ("yes", {"lark": 'start: "yes"'})):
            request = ask(PROMPT, gamma=gamma, grammar=common.Grammar(**grammar), ignore_eos=True, max_tokens=20)
            async with client(house.coordinator) as stub:
                output = await generate(stub, request)
            assert (output.text, output.finish) == (text, FinishReason.STOP)
            assert len(output.token_ids) == 3, "no end token is needed, nor a step for it"
    request = ask(PROMPT, grammar=common.Grammar(regex="a*"), ignore_eos=True, max_tokens=20)
    async with client(house.coordinator) as stub:
        output = await generate(stub, request)
    assert (output.text, output.finish) == ("a" * 20, FinishReason.LENGTH)


async def test_any_json_object(house: House) -> None:
    grammar = common.Grammar(json_object=True)
    wished = [
        # Many ways lead on for long; a bias towards what ends a text.
        ask(PROMPT, seed=seed, grammar=grammar, max_tokens=600, logit_bias={1: 4.0, 92: 6.0, 60: 4.0}, gamma=gamma)
        for seed in range(8)
        for gamma in (0, 3)
    ]
    outputs = await generate_all(house.coordinator, wished)
    ended = [output for output in outputs if output.finish is FinishReason.STOP]
    assert len(ended) > 4
    assert all(isinstance(json.loads(output.text), dict) for output in ended)
    for plain, guessed in zip(outputs[::2], outputs[1::2], strict=True):
        assert plain.token_ids == guessed.token_ids


async def test_a_guess_that_fails_leaves_no_mask_behind(verifier: str, loaded: LoadedModel) -> None:
    """The text does not depend on guesses, which are in the same place of another rule: there d follows, here b."""
    spelt, prompt = loaded.tokenizer.encode, list(loaded.tokenizer.encode(PROMPT))
    form = common.Grammar(lark='start: "<" ("a" X "b" | "c" X "d")\nX: /x+/')
    likely = dict(zip(spelt("adb"), (99.0, 66.0, 33.0), strict=True))
    async with verifying(verifier) as stream:
        patient = {"gamma": 8, "draft_wait_us": PATIENT_US}
        await stream.open(prompt, grammar=form, logit_bias=likely, max_tokens=8, **patient)
        await stream.verdict()
        await stream.guess(len(prompt) + 1, spelt("cx"))
        await stream.guess(len(prompt) + 1, spelt("a"), first_id=3)
        await stream.steer(gamma=1)
        accepted = await stream.verdict()
        await stream.rest()
    assert accepted.tokens == spelt("ax")
    assert stream.tokens[:4] == spelt("<axb")


async def test_another_verifier_goes_on_in_the_middle(verifier: str, loaded: LoadedModel) -> None:
    """As after a failover: all that there is are the committed tokens."""
    prompt = list(loaded.tokenizer.encode(PROMPT))
    drawing = {"temperature": 1.0, "seed": 4, "max_tokens": 600, "grammar": FLAT}
    async with verifying(verifier) as stream:
        await stream.open(prompt, **drawing)
        await stream.rest()
        whole = stream.tokens
    assert json.loads(loaded.tokenizer.decode(whole, skip_special_tokens=True))
    for said in range(1, len(whole), 3):
        async with verifying(verifier) as stream:
            await stream.open([*prompt, *whole[:said]], session_id=f"s{said}", prompt_length=len(prompt), **drawing)
            await stream.rest()
            assert stream.tokens == whole[said:]


async def test_logprobs_are_the_models_own(verifier: str, loaded: LoadedModel, plain_target: LlamaForCausalLM) -> None:
    prompt = list(loaded.tokenizer.encode(PROMPT))
    async with verifying(verifier) as stream:
        await stream.open(prompt, temperature=0.0, grammar=FLAT, max_tokens=10, logprobs=2)
        verdicts = await stream.rest()
    entries = [entry for verdict in verdicts for entry in verdict.logprobs]
    with torch.inference_mode():
        logits = plain_target(torch.tensor([prompt + stream.tokens])).logits[0].double()
    logs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    assert [entry.logprob for entry in entries] == pytest.approx(
        [float(row[token]) for row, token in zip(logs, stream.tokens, strict=True)], abs=1e-4
    )
    assert any(token not in entry.top_ids for token, entry in zip(stream.tokens, entries, strict=True))


# --- what is refused -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    grammar: common.Grammar
    field: str
    said: str


BAD = {
    "no form": Bad(common.Grammar(), "params.grammar", "empty"),
    "false": Bad(common.Grammar(json_object=False), "params.grammar", "empty"),
    "no JSON": Bad(common.Grammar(json_schema="{"), "params.grammar.json_schema", "JSON"),
    "no schema": Bad(common.Grammar(json_schema='{"type": "text"}'), "params.grammar.json_schema", "Invalid type"),
    "regex": Bad(common.Grammar(regex="(a"), "params.grammar.regex", "unclosed group"),
    "lark": Bad(common.Grammar(lark="start: nowhere"), "params.grammar.lark", "unknown name"),
    "large": Bad(common.Grammar(regex="a" * 70_000), "params.grammar.regex", "at most 65536 bytes"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_cannot_be_is_refused_at_every_edge(house: House, verifier: str, name: str) -> None:
    bad = BAD[name]
    async with client(house.coordinator) as stub:
        failures = [await failure(stub.Generate(ask(PROMPT, grammar=bad.grammar), timeout=10))]
    async with verifying(verifier) as stream:
        await stream.call.write(verify.VerifyRequest(open=opening([1, 2], grammar=bad.grammar)))
        failures.append(await failure(stream.call))
    for code, _, typed in failures:
        assert (code, typed.code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request", bad.field)
        assert bad.said in typed.message
        assert len(typed.message) < 400


async def test_a_grammar_that_takes_minutes_is_refused_and_holds_up_nobody(house: House) -> None:
    """Six at once, as many as there are threads for large requests on two processors."""
    minutes = json.dumps({"allOf": [{"pattern": f".*a.{{{10 + i}}}"} for i in range(20)]})
    large = "too long for the context " * 1000
    async with client(house.coordinator) as stub:
        await generate(stub, ask(PROMPT, grammar=FLAT, max_tokens=1))
        asked = [ask(PROMPT, grammar=common.Grammar(json_schema=minutes), seed=seed) for seed in range(6)]
        trials = [asyncio.create_task(failure(stub.Generate(each, timeout=60))) for each in asked]
        await asyncio.sleep(0.5)
        code, _, _ = await failure(stub.Generate(ask(large), timeout=10))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert not any(trial.done() for trial in trials)
        for code, _, typed in await asyncio.gather(*trials):
            assert (code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "params.grammar.json_schema")
            assert "must be compiled within" in typed.message
        assert (await generate(stub, ask(PROMPT, grammar=FLAT, max_tokens=1))).token_ids


async def test_an_output_that_is_against_the_grammar_is_refused(verifier: str) -> None:
    for said, field in (([65, 65], "params.grammar.regex"), ([66, 67, 68], "open.tokens")):
        async with verifying(verifier) as stream:
            request = opening([1, 2, *said], prompt_length=2, grammar=common.Grammar(regex="bc|cd"))
            await stream.call.write(verify.VerifyRequest(open=request))
            _, _, typed = await failure(stream.call)
            assert typed.field in (field, "params.grammar.regex")


async def test_a_grammar_that_fails_on_the_way_ends_its_own_session_only(
    verifier: str, loaded: LoadedModel, greedy: Greedy
) -> None:
    prompt = list(loaded.tokenizer.encode(PROMPT))
    hard = common.Grammar(regex="((((a{100}){100}){100}){100})")
    async with verifying(verifier) as bystander:
        await bystander.open(prompt, session_id="bystander", max_tokens=150)
        await bystander.verdict()
        async with verifying(verifier) as stream:
            await stream.open(prompt, grammar=hard, max_tokens=300)
            code, _, typed = await failure(stream.call)
        await bystander.rest()
        assert bystander.tokens == greedy(prompt, 150)
    assert (code, typed.field) == (grpc.StatusCode.INVALID_ARGUMENT, "params.grammar.regex")
    assert "failed after" in typed.message


# --- drafters --------------------------------------------------------------------------------------------------------


async def test_a_drafter_that_knows_the_grammar_is_believed_more(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model drafts the same outputs; once it does not look at the grammar."""

    async def served() -> tuple[list[Output], float]:
        with after_joining(house.loaded, house.service):
            outputs = await generate_all(house.coordinator, requests(gamma=4, drafter="model"))
        guessed = sum(output.stats.draft_tokens for output in outputs)
        return outputs, sum(output.stats.accepted_tokens for output in outputs) / guessed

    masked, of_masked = await served()
    monkeypatch.setattr(GrammarCursor, "allowed", lambda *_: None)
    free, of_free = await served()
    assert [output.token_ids for output in free] == [output.token_ids for output in masked]
    assert of_masked > 0.4, (of_masked, of_free)
    assert of_masked > 2 * of_free, (of_masked, of_free)


async def test_a_drafter_without_the_targets_tokenizer_drafts_all_the_same(models: Models, loaded: LoadedModel) -> None:
    """Under a grammar that forbids what it copies: what is known of one target is not held against another."""
    prompt = list(loaded.tokenizer.encode("again and again and again and "))
    async with drafter_serving(kind="ngram", target=str(models.target)) as address, drafting(address) as stream:
        await stream.open(prompt, grammar=common.Grammar(regex="x"), vocabulary_digest="another", eos_token_ids=[END])
        guess = await stream.guess()
    assert loaded.tokenizer.decode(list(guess.tokens)) == "agai"


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("kind", ["model", "suffix", "ngram", "suffix+model"])
async def test_every_guess_fits(models: Models, loaded: LoadedModel, kind: str, branches: int) -> None:
    """What has come again and again goes on with cdab, and only cda is allowed to."""
    prompt = list(loaded.tokenizer.encode("abcd" * 8 + "ab"))
    form = "cda[xy]{3,}"
    guide = GrammarCompiler(lambda: tokenizer_json(loaded.tokenizer), [END]).compile(
        SamplingParams(grammar=Form(regex=form))
    )
    flags = {"kind": kind, "target": str(models.target), "device": "cpu", "suffix_certainty": 0.01}
    if "model" in kind:
        flags["model"] = str(models.draft)
    async with drafter_serving(**flags) as address, drafting(address) as stream:
        await stream.open(
            prompt,
            gamma=6,
            branches=branches,
            grammar=common.Grammar(regex=form),
            vocabulary_digest=loaded.vocabulary.digest,
            eos_token_ids=[END],
        )
        guess = await stream.guess()
    paths: list[list[int]] = [[]]
    for i, token in enumerate(guess.tokens):
        paths.append([*paths[guess.parents[i] if guess.parents else i], token])
    assert all(guide.count_allowed(path) == len(path) for path in paths)
    longest = loaded.tokenizer.decode(max(paths, key=len))
    if kind in ("suffix", "ngram"):
        assert longest == "cda"
    else:
        # A tree of two drafters spends some of its guesses beside each other.
        least = 1 if kind == "suffix+model" and branches > 1 else 3
        assert re.fullmatch(f"cda[xy]{{{least},3}}", longest), longest


# --- the command line ------------------------------------------------------------------------------------------------


async def test_flags_of_generate(tmp_path: Any) -> None:
    schema = json.dumps(SCHEMAS["flat"])
    (tmp_path / "schema.json").write_text(schema)
    assert options.output_form("", False, "") is None
    assert options.output_form(schema, False, "") == Form(json_schema=schema)
    assert options.output_form(str(tmp_path / "schema.json"), False, "") == Form(json_schema=schema)
    assert options.output_form("", True, "") == Form(json_object=True)
    assert options.output_form("", False, "a+") == Form(regex="a+")
    with pytest.raises(InvalidRequest, match="--json-schema"):
        options.output_form("/nowhere.json", False, "")


async def test_a_program_asks_for_a_form(house: House) -> None:
    def program() -> str:
        with Client([house.coordinator], timeout_s=20) as asking:
            with pytest.raises(OutriderError, match="unclosed"):
                asking.complete(prompt=PROMPT, params=SamplingParams(grammar=Form(regex="(")))
            params = SamplingParams(grammar=Form(regex="(yes|no)!"), max_tokens=9)
            return asking.complete(prompt=PROMPT, params=params).text

    assert await asyncio.to_thread(program) in ("yes!", "no!")
