"""Options of several commands, each with its environment variable."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from outrider.base.config import option
from outrider.base.endpoint import allowed
from outrider.client.sync import Client
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.fieldwise import from_plain
from outrider.protocol.sampling_params import Grammar, SamplingParams, Verification
from outrider.protocol.speculation import MAX_BRANCHES, MAX_GAMMA
from outrider.security.api_keys import ApiKeys
from outrider.security.tls import Tls

Endpoint = Annotated[str, option("--endpoint", "host:port of the coordinator; several with commas are tried in turn.")]
ApiKey = Annotated[str, option("--api-key", "API key for the coordinator, or @FILE.")]
TlsCa = Annotated[str, option("--tls-ca", "PEM file: authority of the coordinator's certificate; system: public ones.")]
TlsCert = Annotated[str, option("--tls-cert", "PEM file: client certificate, if the coordinator requires one.")]
TlsKey = Annotated[str, option("--tls-key", "PEM file: private key of --tls-cert.")]
TlsName = Annotated[str, option("--tls-name", "Name in the coordinator's certificate. Default: host of --endpoint.")]
Model = Annotated[str, option("--model", "Target, by name or alias, where a fleet has several.", envvar=None)]
MaxTokens = Annotated[int, option("--max-tokens", "Maximum number of tokens to generate.")]
Temperature = Annotated[float, option("--temperature", "0 is greedy: the most likely token.")]
TopK = Annotated[int, option("--top-k", "Draw from this many most likely tokens; 0: all.")]
TopP = Annotated[float, option("--top-p", "Draw from the most likely tokens with this total probability.")]
MinP = Annotated[float, option("--min-p", "Exclude tokens below this share of the highest probability.")]
Seed = Annotated[int | None, option("--seed", "Equal seeds, equal texts (not in rejection and block mode).")]
Gamma = Annotated[
    int | None,
    option("--gamma", "Fix γ, the tokens guessed ahead; 0: plain decoding. Else adaptive.", min=0, max=MAX_GAMMA),
]
Branches = Annotated[
    int | None, option("--branches", "Fix the guesses per position. Default: adaptive.", min=1, max=MAX_BRANCHES)
]
Ahead = Annotated[bool | None, option("--ahead/--in-turns", "Draft during checks, or in turns. Default: adaptive.")]
Explain = Annotated[bool, option("--explain", "Print expected and measured throughput of each plan at the end.")]
Drafter = Annotated[str, option("--drafter", "Use only drafters of this kind, as suffix; else any.", envvar=None)]
Mode = Annotated[
    str | None,
    option("--verification", "greedy, coupled, rejection or block. Default: greedy at temperature 0, else coupled."),
]
Stop = Annotated[list[str] | None, option("--stop", "End the text before this string; repeatable.", envvar=None)]
JsonSchema = Annotated[str, option("--json-schema", "Generate only JSON of this JSON schema: a file, or the schema.")]
JsonObject = Annotated[bool, option("--json-object", "Generate only a JSON object.")]
Regex = Annotated[str, option("--regex", "Generate only text that this whole regular expression matches.")]
ShowGuesses = Annotated[bool, option("--show-guesses", "Colour tokens by kind: accepted, recovered, bonus or plain.")]
Plain = Annotated[bool, option("--plain", "Disable speculation; the same as --gamma 0.")]


def connect(flags: Mapping[str, Any]) -> Client:
    """Return a client of the coordinators given by the flags of a command."""
    return Client(
        allowed(flags["endpoint"], allow_remote=True),
        timeout_s=flags.get("timeout_s"),
        api_key=ApiKeys.parse(flags["api_key"], "api_key").first,
        tls=Tls.load(cert=flags["tls_cert"], key=flags["tls_key"], ca=flags["tls_ca"], name=flags["tls_name"]),
    )


def sampling(flags: Mapping[str, Any]) -> SamplingParams:
    """Return validated sampling parameters from the flags of a command."""
    given = {name: value for name, value in flags.items() if value is not None}
    mode, modes = given.get("verification"), [kind.name.lower() for kind in Verification]
    if mode is not None and mode not in modes:
        raise InvalidRequest.of("--verification", mode, f"one of {', '.join(modes)}")
    if "regex" in given:
        given["grammar"] = output_form(given["json_schema"], given["json_object"], given["regex"])
    params = from_plain(SamplingParams, given)
    params.check()
    return params


def output_form(json_schema: str, json_object: bool, regex: str) -> Grammar | None:
    """Return the grammar given by the flags; None: any text."""
    if not (json_schema or json_object or regex):
        return None
    if json_schema and not json_schema.lstrip().startswith("{"):
        try:
            json_schema = Path(json_schema).expanduser().read_text(encoding="utf-8")
        except (OSError, RuntimeError, UnicodeDecodeError) as error:  # of ~ without a home
            raise InvalidRequest.of("--json-schema", json_schema, f"a JSON object or its file: {error}") from error
    return Grammar(json_schema=json_schema, json_object=json_object, regex=regex)
