"""Settings of the coordinator."""

from __future__ import annotations

from pydantic import Field, SecretStr

from outrider.base.config import DrafterKey, Settings


class CoordinatorSettings(Settings, DrafterKey):
    """Serve clients: sessions, text, workers, γ control."""

    http_port: int = Field(
        8000, ge=-1, le=65535, description="Port of the HTTP API and the playground; 0: any free one, -1: none."
    )
    served_model_name: str = Field("", description="Name of the target in the HTTP API; empty: its own.")
    cors_origins: str = Field("", description="Origins whose web pages may call the HTTP API, separated by commas.")
    allowed_hosts: str = Field(
        "",
        description="Names allowed in an HTTP request's Host besides localhost, separated by commas. Empty: only "
        "localhost on loopback, else all.",
    )
    max_bodies_mib: int = Field(
        64, ge=1, description="Memory for HTTP and gRPC requests over 64 KiB that are read at once, MiB."
    )
    redis_url: str = Field(
        "", description="Redis for sessions, or @FILE with its URL; empty: REDIS_URL, else a private one."
    )
    max_sessions: int = Field(512, ge=1, description="Sessions served at once.")
    max_prompt_kib: int = Field(4096, ge=1, description="Largest prompt, KiB of text.")
    gamma_max: int = Field(16, ge=0, le=64, description="Largest γ that adaptive control may choose; twice that ahead.")
    drafters_per_session: int = Field(1, ge=1, le=8, description="Largest number of drafters for one session.")
    heartbeat_ms: int = Field(
        1000, ge=50, description="Interval of workers' reports, ms; a worker is lost after five times this."
    )
    worker_wait_s: float = Field(30.0, ge=0, description="Time that a session waits for a verifier, seconds.")
    verdict_timeout_s: float = Field(
        10.0, gt=0, description="Time after which a verifier without a verdict loses a session; longer for prompts, s."
    )
    session_ttl_s: int = Field(
        3600, ge=10, description="Time that Redis keeps a session after its last write, seconds."
    )
    api_keys: SecretStr = Field(
        SecretStr(""),
        description="API keys of clients, separated by commas, or @FILE with one per line; empty: no keys needed.",
    )
    default_max_sessions: int = Field(0, ge=0, description="Concurrent sessions of an API key; 0: a fair share of all.")
    default_requests_per_minute: int = Field(0, ge=0, description="Requests per minute of an API key; 0: no limit.")
    default_tokens_per_minute: int = Field(
        0, ge=0, description="Tokens per minute of an API key, prompts and outputs together; 0: no limit."
    )
    max_request_sessions: int = Field(
        64, ge=1, description="Largest number of answers of one HTTP request: n times its prompts."
    )
    write_timeout_s: float = Field(30.0, gt=0, description="Time that a client may leave its messages unread, seconds.")
    open_metrics: bool = Field(
        False, description="Serve HTTP /metrics without an API key, as vLLM does: benchmark tools send none there."
    )
    share_prefixes: bool = Field(False, description="Share cached prompt prefixes between API keys.")
