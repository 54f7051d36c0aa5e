"""HTTP requests: bodies mutated by structure and as text, unusual headers and framing, and noise."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from tests.fuzz import corpus, values

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Longer answers are not read to their end.
_FEW_TOKENS = 64


@cache
def bodies() -> list[tuple[str, dict[str, Any]]]:
    few = {"max_tokens": corpus.FEW, "ignore_eos": True}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    schema = {"name": "s", "schema": json.loads(corpus.SCHEMA), "strict": True}
    tool = {"type": "function", "function": {"name": "f", "description": "Does it.", "parameters": schema["schema"]}}
    call = {"id": "call-1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    called = [
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "call-1", "content": "Done."},
    ]
    return [
        (COMPLETIONS, few | {"prompt": corpus.TEXT, "temperature": 0}),
        (
            COMPLETIONS,
            few | {"prompt": corpus.TEXT, "seed": 3, "stream": True, "stream_options": {"include_usage": True}},
        ),
        (COMPLETIONS, few | {"prompt": ["a", "b"], "n": 2, "seed": 5, "echo": True}),
        (COMPLETIONS, few | {"prompt": corpus.PROMPT, "logprobs": 3, "temperature": 0.0, "stop": ["\n", "x"]}),
        (
            COMPLETIONS,
            few | {"prompt": [corpus.PROMPT, [1, 2]], "logit_bias": {"65": 3, "66": -100}, "stop_token_ids": [1]},
        ),
        (COMPLETIONS, few | {"prompt": "x", "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}),
        (COMPLETIONS, few | {"prompt": "x", "response_format": {"type": "regex", "regex": "[a-z]+"}, "user": "me"}),
        (COMPLETIONS, few | {"prompt": "x", "response_format": {"type": "json_object"}, "metadata": {"a": "b"}}),
        (
            COMPLETIONS,
            few | {"prompt": "x", "speculation": {"gamma": 4, "branches": 2, "verification": "block", "show": True}},
        ),
        (CHAT, few | {"messages": messages, "response_format": {"type": "json_schema", "json_schema": schema}}),
        (CHAT, few | {"messages": messages, "logprobs": True, "top_logprobs": 2, "n": 2, "stream": True}),
        (CHAT, few | {"messages": messages[:1], "presence_penalty": 1, "frequency_penalty": -1, "cache_salt": "me"}),
        (
            CHAT,
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_completion_tokens": 3,
                "model": "target",
                "tools": [],
            },
        ),
        (CHAT, few | {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}),
        (CHAT, few | {"messages": messages + called, "tools": [tool], "parallel_tool_calls": False, "stream": True}),
        (CHAT, few | {"messages": messages, "tools": [tool], "tool_choice": "required", "n": 2, "logprobs": True}),
        (
            CHAT,
            few
            | {"messages": messages, "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ("/tokenize", {"prompt": corpus.TEXT, "add_special_tokens": False, "return_token_strs": True}),
        ("/tokenize", {"messages": messages, "add_generation_prompt": True, "continue_final_message": False}),
        ("/detokenize", {"tokens": corpus.PROMPT}),
    ]


def make(rng: random.Random) -> tuple[str, str, tuple[bytes, ...], bool]:
    """Return a description, the transport, the pieces, and whether an answer is required."""
    return rng.choices((_mutated, _odd_text, _odd_head, _odd_framing, _other_route, _noise), _ODDS)[0](rng)


_ODDS = (0.55, 0.12, 0.11, 0.1, 0.07, 0.05)


# Well-formed HTTP with unusual bodies.


def _mutated(rng: random.Random) -> tuple[str, str, tuple[bytes, ...], bool]:
    path, body = copy.deepcopy(rng.choice(bodies()))
    for _ in range(rng.choices((0, 1, 2, 4), (0.05, 0.6, 0.25, 0.1))[0]):
        change(rng, body)
    data = _json(body)
    headers = {} if rng.random() < 0.8 else {"Idempotency-Key": values.text(rng)[:300] or "k"}
    if rng.random() < 0.15:
        return "body in chunks", "http", (_chunked(rng, path, data),), quick(body)
    return "body", "http", (request("POST", path, data, headers),), quick(body)


def change(rng: random.Random, body: Any) -> None:
    """Change one place of a JSON value: another type or value, removed, duplicated, wrapped, or a field added."""
    places = list(_places(body))
    if not places:
        return
    holder, key = rng.choice(places)
    kind = rng.random()
    if kind < 0.2:
        del holder[key]
    elif kind < 0.3 and isinstance(holder, dict):
        holder[_name(rng)] = _any(rng)
    elif kind < 0.4:
        holder[key] = rng.choice(([holder[key]], {"a": holder[key]}, [holder[key]] * rng.choice((2, 17, 1025))))
    else:
        holder[key] = _like(rng, holder[key])


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(items):
        yield value, key
        yield from _places(each)


def _name(rng: random.Random) -> str:
    return rng.choice(
        ("n", "best_of", "echo", "logprobs", "stream", "seed", "suffix", "store", "", "\u0000", "__class__", "a" * 300)
    )


def _like(rng: random.Random, now: Any) -> Any:
    if rng.random() < 0.3:
        return _any(rng)
    if isinstance(now, bool):
        return not now
    if isinstance(now, int):
        return values.integer(rng, -(2**64), 2**65, now)
    if isinstance(now, float):
        return rng.choice(values.FLOATS)
    if isinstance(now, str):
        return values.text(rng, now)
    if isinstance(now, list) and now:
        return rng.choice((now[:-1], now * rng.choice((2, 50)), now[::-1], []))
    return _any(rng)


def _any(rng: random.Random) -> Any:
    plain = (None, True, False, 0, 1, -1, 2**31, 2**64, 0.5, 1e300, "", "x", [], {}, [[]], [None], {"": {}}, "\ud800")
    return rng.choice((*plain, values.text(rng), rng.choice(values.FLOATS)))


def _json(body: Any) -> bytes:
    """Encode JSON, with NaN as Python writes it and lone surrogates as escapes."""
    return json.dumps(body).encode()


def quick(body: Any) -> bool:
    """Return whether the answer, if any, is short."""
    tokens = [body[name] for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    long = [each for each in tokens if isinstance(each, int | float) and each > _FEW_TOKENS]
    absent = not tokens and body.get("messages") is not None
    many = any(isinstance(body.get(name), int | float) and body[name] > 2 for name in ("n", "best_of"))
    prompts = body.get("prompt")
    return not (
        long or absent or many or (isinstance(prompts, list) and len(prompts) > 2 and not isinstance(prompts[0], int))
    )


def _odd_text(rng: random.Random) -> tuple[str, str, tuple[bytes, ...], bool]:
    path, body = rng.choice(bodies())
    text = json.dumps(body)
    at = rng.randrange(len(text))
    odd: tuple[bytes, ...] = (
        text[:at].encode(),
        (text[:at] + rng.choice(values.STRINGS) + text[at:]).encode("utf-8", "surrogatepass"),
        text.encode("utf-16"),
        text.encode("utf-32-be"),
        b"\xef\xbb\xbf" + text.encode(),
        text.encode() + b"\x00",
        text.encode() * 2,
        b"[" * rng.choice((10, 150, 20_000)) + b"]" * 10,
        b'{"prompt": ' + b"9" * rng.choice((30, 4_000, 6_000)) + b"}",
        b'{"prompt": "x", "max_tokens": 2, "max_tokens": '
        + rng.choice((b"3", b"-0", b"1e999", b"1E400", b"0x1"))
        + b"}",
        b'{"prompt": "\\ud800' + rng.choice((b'"}', b'\\udc00"}', b"\\u")),
        b'{"prompt": "' + rng.randbytes(20).replace(b'"', b"") + b'"}',
        b"",
        rng.randbytes(rng.choice((1, 30, 5_000))),
    )
    return "odd text", "http", (request("POST", path, rng.choice(odd)),), False


# Unusual headers and framing.


def request(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    fields = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(body))} | (
        headers or {}
    )
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body


def _odd_head(rng: random.Random) -> tuple[str, str, tuple[bytes, ...], bool]:
    path, body = rng.choice(bodies())
    data = _json(body)
    odd = {
        "Content-Type": rng.choice(
            ("", "text/plain", "application/json; charset=utf-16", "application/json" * 200, "a\x00b")
        ),
        "Host": rng.choice(("", "evil.example", "127.0.0.1:1", "[::1", "\u00e9", "a, b", "localhost.")),
        "Authorization": rng.choice(("Bearer ", "Basic eDp5", "Bearer " + "k" * 9_000, "\u00e9\u00e9")),
        "Idempotency-Key": rng.choice(("k" * 256, "k" * 257, "two words", "\u00e9", "", "same")),
        "X-Request-Id": rng.choice(("r" * 5_000, "\u202e", "a\tb", "", "x" * 129)),
        "Traceparent": rng.choice(("00-" + "0" * 32 + "-" + "0" * 16 + "-01", "zz", "-" * 500)),
        "Content-Length": rng.choice(("-1", "+5", "0x10", "1e3", "9" * 30, "5, 5", "", " ", "12345678")),
        "Transfer-Encoding": rng.choice(("chunked", "gzip", "chunked, chunked", "identity", "xchunked", "chunked\x0b")),
        "Content-Encoding": rng.choice(("gzip", "br", "identity", "x" * 200)),
        "Expect": rng.choice(("100-continue", "200-ok", "")),
        "Connection": rng.choice(("close", "upgrade", "keep-alive, close", "")),
        "Upgrade": rng.choice(("websocket", "h2c", "TLS/1.0")),
        "Accept": rng.choice(("", "text/event-stream", "*/*;q=0", "x" * 3_000)),
        "Origin": "http://evil.example",
        "X" * rng.choice((1, 2_000, 70_000)): "y",
        "X-Long": "y" * rng.choice((3_000, 70_000)),
        "": "no name",
        "a b": "c",
    }
    names = rng.sample(tuple(odd), rng.choice((1, 1, 2, 4)))
    return "odd head", "http", (request("POST", path, data, {name: odd[name] for name in names}),), False


def _chunked(rng: random.Random, path: str, data: bytes) -> bytes:
    size = rng.choice((1, 7, 64, len(data) or 1))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in _parts(data, max(size, len(data) // 40)))
    fields = ("Host: 127.0.0.1", "Content-Type: application/json", "Transfer-Encoding: chunked")
    return "\r\n".join((f"POST {path} HTTP/1.1", *fields, "", "")).encode() + chunks + b"0\r\n\r\n"


def _parts(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def _odd_framing(rng: random.Random) -> tuple[str, str, tuple[bytes, ...], bool]:
    """Return request smuggling: two lengths, invalid chunks, a second request in the first one's body."""
    path, body = rng.choice(bodies())
    data = _json(body)
    whole, chunks = request("POST", path, data), _chunked(rng, path, data)
    inner = request("GET", "/fleet")
    odd: tuple[tuple[str, tuple[bytes, ...]], ...] = (
        ("CL and TE", (chunks.replace(b"Transfer-", b"Content-Length: 5\r\nTransfer-", 1),)),
        ("TE and CL", (request("POST", path, b"0\r\n\r\n" + inner, {"Transfer-Encoding": "chunked"}),)),
        ("two lengths", (whole.replace(b"Content-Length:", b"Content-Length: 0\r\nContent-Length:", 1) + inner,)),
        (
            "bad chunk size",
            (
                chunks.replace(
                    b"\r\n\r\n", b"\r\n\r\n" + rng.choice((b"-1\r\n", b"0x5\r\n", b"fffffffffffffffff\r\n")), 1
                ),
            ),
        ),
        ("chunk extension", (chunks.replace(b"\r\n0\r\n", b"\r\n0;" + b"x" * rng.choice((5, 20_000)) + b"\r\n"),)),
        ("trailers", (chunks[:-2] + b"X: y\r\n" * rng.choice((1, 500)) + b"\r\n",)),
        ("bare line feeds", (whole.replace(b"\r\n", b"\n"),)),
        ("folded header", (whole.replace(b"Host:", b"X: a\r\n b\r\nHost:", 1),)),
        ("pipelined", (request("GET", "/health") * rng.choice((2, 20)) + whole,)),
        ("in pieces", tuple(_parts(whole, rng.choice((9, 50, 200))))),
        ("cut off", (whole[: rng.randrange(len(whole))],)),
        (
            "HTTP/1.0",
            (
                whole.replace(
                    b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"HTP/1.1")), 1
                ),
            ),
        ),
        ("no host", (whole.replace(b"Host: 127.0.0.1\r\n", b"", 1),)),
        ("two hosts", (whole.replace(b"Host:", b"Host: evil.example\r\nHost:", 1),)),
    )
    name, pieces = rng.choice(odd)
    return name, "http", pieces, False


def _other_route(rng: random.Random) -> tuple[str, str, tuple[bytes, ...], bool]:
    methods = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "POST", "BREW", "get")
    routes = (
        "/health",
        "/ready",
        "/metrics",
        "/fleet",
        "/v1/models",
        "/v1/models/target",
        "/openapi.json",
        "/",
        CHAT,
        COMPLETIONS,
    )
    odd = (
        "/v1/models/" + rng.choice(("%00", "%ff", "..%2f..%2fetc", "a" * 5_000, "%ed%a0%80", "\u00e9")),
        "//health",
        "/health?" + "x=y&" * rng.choice((1, 500)),
        "/%2e%2e/%2e%2e/etc/passwd",
        "/playground.css/../../app.py",
        "http://evil.example/health",
        "*",
        "/\u202e",
        "/health#x",
        "/v1/../fleet",
    )
    path = rng.choice(routes if rng.random() < 0.5 else odd)
    body = rng.choice((b"", b"", b"{}", rng.randbytes(40)))
    return "other route", "http", (request(rng.choice(methods), path, body),), False


def _noise(rng: random.Random) -> tuple[str, str, tuple[bytes, ...], bool]:
    odd: tuple[Callable[[], bytes], ...] = (
        lambda: rng.randbytes(rng.choice((1, 20, 5_000))),
        lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(60),
        lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        lambda: b"\r\n" * rng.choice((1, 5_000)),
        lambda: b"GET " + b"/" * rng.choice((9, 100_000)) + b" HTTP/1.1\r\n\r\n",
        lambda: b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * rng.choice((10, 5_000)) + b"\r\n",
        lambda: b"",
        lambda: b"\x00" * 300 + b"\r\n\r\n",
    )
    return "noise", "http", (rng.choice(odd)(),), False
