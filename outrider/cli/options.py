"""Options that several commands share: each flag with its environment twin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.base.config import PREFIX
from outrider.client.sync import Client
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling_params import Grammar, SamplingParams, Verification
from outrider.security.api_keys import ApiKeys
from outrider.security.tls import Tls


def option(flag: str, text: str, **more: Any) -> Any:
    """A flag and its twin: --max-tokens and OUTRIDER_MAX_TOKENS."""
    names = [flag, *more.pop("short", [])]
    first = flag.split("/")[0].removeprefix("--")
    return typer.Option(*names, envvar=PREFIX + first.upper().replace("-", "_"), help=text, **more)


Endpoint = Annotated[
    str, option("--endpoint", "host:port of the coordinator; several, separated by commas, are tried in turn.")
]
ApiKey = Annotated[str, option("--api-key", "Key that the coordinator asks for, or @FILE.")]
TlsCa = Annotated[
    str,
    option("--tls-ca", "PEM file: who must have signed the coordinator's certificate; system: a public authority."),
]
TlsCert = Annotated[str, option("--tls-cert", "PEM file: our own certificate, where the coordinator asks for one.")]
TlsKey = Annotated[str, option("--tls-key", "PEM file: the key to --tls-cert.")]
TlsName = Annotated[
    str, option("--tls-name", "Name that the coordinator's certificate must hold; default: the host in --endpoint.")
]
MaxTokens = Annotated[int, option("--max-tokens", "Most tokens to generate.")]
Temperature = Annotated[float, option("--temperature", "0 is greedy: always the likeliest token.")]
TopK = Annotated[int, option("--top-k", "Draw from this many likeliest tokens; 0: all.")]
TopP = Annotated[float, option("--top-p", "Draw from the likeliest tokens that hold this much probability.")]
MinP = Annotated[float, option("--min-p", "Leave out tokens below this share of the likeliest one's probability.")]
Seed = Annotated[
    int | None, option("--seed", "Same seed, same text (not in rejection and block mode). Drawn if absent.")
]
Gamma = Annotated[
    int | None, option("--gamma", "Fix γ, the tokens guessed ahead; 0 is plain decoding. Default: adaptive.")
]
Branches = Annotated[
    int | None, option("--branches", "Fix how many guesses stand beside each other. Default: adaptive.", min=1)
]
Ahead = Annotated[
    bool | None,
    option("--ahead/--in-turns", "Whether the drafter goes on while its guesses are checked. Default: adaptive."),
]
Explain = Annotated[
    bool, option("--explain", "Say at the end what γ control expected of each way to speculate, and what came true.")
]
Drafter = Annotated[str, option("--drafter", "Only drafters of this kind: suffix, model, ... Default: any.")]
Mode = Annotated[
    str | None,
    option("--verification", "greedy, coupled, rejection or block. Default: greedy at temperature 0, else coupled."),
]
Stop = Annotated[list[str] | None, option("--stop", "End the text before this string; may be given several times.")]
JsonSchema = Annotated[
    str, option("--json-schema", "Only JSON that this JSON schema describes: a file, or the schema itself.")
]
JsonObject = Annotated[bool, option("--json-object", "Only a JSON object, any.")]
Regex = Annotated[str, option("--regex", "Only text that all of this regular expression matches.")]
ShowGuesses = Annotated[bool, option("--show-guesses", "Colour tokens by what became of the guesses.")]
Plain = Annotated[bool, option("--plain", "Switch speculation off; the same as --gamma 0.")]


def connect(
    endpoint: str,
    *,
    api_key: str,
    tls_ca: str,
    tls_cert: str,
    tls_key: str,
    tls_name: str,
    timeout_s: float | None = None,
) -> Client:
    """A client of the coordinators that the flags name."""
    return Client(
        endpoint.split(","),
        timeout_s=timeout_s,
        api_key=ApiKeys.parse(api_key, "api_key").first,
        tls=Tls.load(cert=tls_cert, key=tls_key, ca=tls_ca, name=tls_name),
    )


def sampling(
    *,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
    verification: str | None,
    stop: list[str] | None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """What the flags ask for, checked before anything is sent."""
    mode = None
    if verification is not None:
        names = [kind.name.lower() for kind in Verification]
        if verification not in names:
            raise InvalidRequest.of("--verification", verification, f"one of {', '.join(names)}")
        mode = Verification[verification.upper()]
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        verification=mode,
        stop=tuple(stop or ()),
        grammar=grammar,
    )
    params.check()
    return params


def output_form(json_schema: str, json_object: bool, regex: str) -> Grammar | None:
    """What the flags ask the output to be; None: any text."""
    if not (json_schema or json_object or regex):
        return None
    if json_schema and not json_schema.lstrip().startswith("{"):
        try:
            json_schema = Path(json_schema).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest.of(
                "--json-schema", json_schema, f"a JSON object or a file with one: {error}"
            ) from error
    return Grammar(json_schema=json_schema, json_object=json_object, regex=regex)
