"""Settings of the coordinator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr

from outrider.base.config import DrafterKey, Int, Seconds, Settings
from outrider.settings.tool_parsers import ToolParser


class CoordinatorSettings(Settings, DrafterKey):
    """Serve clients over gRPC and HTTP; connect drafters and verifiers."""

    http_port: int = Field(8000, ge=-1, le=65535, description="Port of HTTP API and playground; 0: any free, -1: none.")
    served_model_name: str = Field("", description="Name of the default target for clients; empty: its own.")
    default_model: str = Field("", description="Target of requests without a model; empty: the first that registers.")
    alias: str = Field("", description="Further names of targets, NAME=MODEL, separated by commas.")
    tool_parser: ToolParser = Field("auto", description="Form of tool calls; auto: as the chat template shows it.")
    sampling_defaults: Literal["model", "openai"] = Field(
        "model", description="What HTTP requests leave out: the model's generation_config.json first, or OpenAI's."
    )
    cors_origins: str = Field("", description="Origins whose web pages may call the HTTP API, separated by commas.")
    allowed_hosts: str = Field(
        "", description="HTTP Host names to accept besides localhost, by commas; empty: none on loopback, else all."
    )
    max_bodies_mib: Int = Field(64, ge=1, description="Memory for requests over 64 KiB while they arrive, MiB.")
    redis_url: str = Field("", description="URL of Redis, or @FILE; empty: REDIS_URL, else one in memory here.")
    max_sessions: Int = Field(512, ge=1, description="Maximum number of concurrent sessions.")
    model_limits: str = Field("", description="Limits of targets, NAME=LIMIT:NUMBER LIMIT:NUMBER, by commas.")
    max_prompt_kib: Int = Field(4096, ge=1, description="Maximum length of a prompt, KiB of text.")
    gamma_max: int = Field(16, ge=0, le=64, description="Largest γ that γ control chooses; ahead, twice that.")
    drafters_per_session: int = Field(1, ge=1, le=8, description="Maximum number of drafters per session.")
    heartbeat_ms: Int = Field(1000, ge=50, description="Interval of workers' reports, ms; lost after five without one.")
    worker_wait_s: Seconds = Field(30.0, ge=0, description="Time that a session waits for a verifier, seconds.")
    verdict_timeout_s: Seconds = Field(10.0, gt=0, description="Timeout for a verdict, seconds; longer for prompts.")
    session_ttl_s: Int = Field(3600, ge=10, description="Life of a session in Redis after its last write, seconds.")
    api_keys: SecretStr = Field(
        SecretStr(""),
        description="API keys of clients, separated by commas, or @FILE with one per line; empty: no keys needed.",
    )
    default_max_sessions: Int = Field(0, ge=0, description="Concurrent sessions of an API key; 0: a fair share of all.")
    default_requests_per_minute: Int = Field(0, ge=0, description="Requests per minute of an API key; 0: no limit.")
    default_tokens_per_minute: Int = Field(0, ge=0, description="Tokens per minute, with prompts, of a key; 0: any.")
    max_request_sessions: Int = Field(64, ge=1, description="Most choices of an HTTP request: n times its prompts.")
    default_chat_tokens: Int = Field(1024, ge=1, description="Length of an HTTP chat's answer without a limit, tokens.")
    open_metrics: bool = Field(False, description="Serve HTTP /metrics without an API key, as vLLM does, for tools.")
    mixed_verifiers: bool = Field(
        False,
        description="Accept verifiers of the same weights with other engines or number formats: a session that moves "
        "may continue with another text where two tokens are nearly equally likely.",
    )
    share_prefixes: bool = Field(False, description="Share cached prompt prefixes between API keys.")
