"""Settings of the coordinator."""

from __future__ import annotations

from pydantic import Field, SecretStr

from outrider.base.config import DrafterKey, Settings


class CoordinatorSettings(Settings, DrafterKey):
    """Serve clients: sessions, text, workers, γ control."""

    http_port: int = Field(
        8000, ge=-1, le=65535, description="Port of the HTTP API and the playground; 0: any free one, -1: none."
    )
    served_model_name: str = Field("", description="The target's name in the HTTP API; empty: its own.")
    cors_origins: str = Field("", description="Web pages of these origins may call the HTTP API, separated by commas.")
    allowed_hosts: str = Field(
        "",
        description="Names that an HTTP request's Host may have besides localhost, separated by commas. Without any: "
        "only localhost on loopback, elsewhere all.",
    )
    max_bodies_mib: int = Field(
        64, ge=1, description="Requests over 64 KiB that are held at once, over HTTP and gRPC, MiB of all together."
    )
    redis_url: str = Field(
        "", description="Redis for sessions, or @FILE with its URL; empty: REDIS_URL, else a private one."
    )
    max_sessions: int = Field(512, ge=1, description="Sessions served at once.")
    max_prompt_kib: int = Field(4096, ge=1, description="Largest prompt taken, KiB of text.")
    gamma_max: int = Field(16, ge=0, le=64, description="Largest γ that adaptive control may choose; twice that ahead.")
    drafters_per_session: int = Field(1, ge=1, le=8, description="Different drafters that guess for one session.")
    heartbeat_ms: int = Field(1000, ge=50, description="How often workers report, ms; lost after five times this.")
    worker_wait_s: float = Field(30.0, ge=0, description="How long a session waits for a verifier, seconds.")
    verdict_timeout_s: float = Field(
        10.0, gt=0, description="A verifier that owes a verdict for longer loses the session; prompts have longer, s."
    )
    session_ttl_s: int = Field(3600, ge=10, description="How long Redis keeps a session after its last write, seconds.")
    api_keys: SecretStr = Field(
        SecretStr(""), description="Keys of clients, separated by commas, or @FILE with one a line; empty: open to all."
    )
    default_max_sessions: int = Field(0, ge=0, description="Sessions at once of an API key; 0: a fair share of all.")
    default_requests_per_minute: int = Field(0, ge=0, description="Requests a minute of an API key; 0: no limit.")
    default_tokens_per_minute: int = Field(
        0, ge=0, description="Tokens a minute of an API key, of prompts and outputs together; 0: no limit."
    )
    max_request_sessions: int = Field(64, ge=1, description="Answers of one HTTP request: n times its prompts.")
    write_timeout_s: float = Field(
        30.0, gt=0, description="How long a client may leave unread what is sent to it, seconds."
    )
    open_metrics: bool = Field(
        False, description="HTTP /metrics needs no API key, as with vLLM: benchmark tools send none there."
    )
    share_prefixes: bool = Field(False, description="API keys share what is cached of prompts that begin alike.")
