"""Settings of the services: one frozen object each, built in `__main__` from flags and environment variables.

`command` turns a settings class into a typer command, so that a field is defined once: its name gives `--the-flag` and
OUTRIDER_THE_FLAG, its description the help text, its constraints the validation.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from outrider.base.atomic_files import read_named
from outrider.base.endpoint import is_loopback
from outrider.protocol.errors import OutriderError, StartupError

# gRPC's core reads this when it is imported. Else it writes a line for every fault of a caller, past the log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

PREFIX = "OUTRIDER_"
KV_TOKENS = 65_536  # of a cache whose capacity is not given
SettingsT = TypeVar("SettingsT", bound="Settings")
Int = Annotated[int, Field(lt=1 << 31)]  # messages and gRPC's options hold no more
Seconds = Annotated[float, Field(le=1e6)]  # of which gRPC counts the milliseconds

# Every variable that Outrider reads. A test compares this list with the settings and the command line.
_NAMES = (
    "ACCEPTANCE ADVERTISE AHEAD ALIAS ALLOWED_HOSTS ALLOW_REMOTE API_KEY API_KEYS BLUR BRANCHES BUSY CAPACITY CHAT "
    "CONFIG COORDINATORS CORS_ORIGINS DATA DEFAULT_CHAT_TOKENS DEFAULT_MAX_SESSIONS DEFAULT_MODEL "
    "DEFAULT_REQUESTS_PER_MINUTE DEFAULT_TOKENS_PER_MINUTE DEVICE DRAFTER DRAFTERS DRAFTERS_PER_SESSION DRAFTER_APART "
    "DRAFTER_DEVICE DRAFTER_KEY DRAFT_CANDIDATES DRAFT_VOCABULARY DRAIN_S DTYPE EARLY_EXIT ENDPOINT ENGINE EXAMPLES "
    "EXIT_LAYERS EXPLAIN FLEET FEATURE_DTYPE FLEET_KEY FROM GAMMA GAMMA_MAX GPU_MEMORY GRPC_SHARE GUESS_ROWS HEADS "
    "HEARTBEAT_MS HIDDEN HOME HOST HTTP_ENDPOINT HTTP_PORT HTTP_SHARE INSECURE JSON JSON_OBJECT JSON_SCHEMA KIND KINDS "
    "KV_DTYPE KV_TOKENS LAYERS LEARNING_RATE LLAMA_PYTHON LOG_JSON LOG_LEVEL MARKOV MAX_BODIES_MIB MAX_CONNECTIONS "
    "MAX_MESSAGE_MIB MAX_MODEL_LEN MAX_PROMPT_KIB MAX_REQUEST_SESSIONS MAX_SESSIONS MAX_STREAMS MAX_TOKENS MAX_USERS "
    "MAX_WAITING METRICS_KEY METRICS_PORT METRICS_TLS MIN_P MIXED_VERIFIERS MODEL MODEL_LIMITS MODES NGRAM_MAX "
    "NGRAM_MIN NUM_PROMPTS OPEN_METRICS OPEN_TIMEOUT_S OTLP_ENDPOINT OUT OWN_DRAFTER PACE PIPELINE_PARALLEL PLAIN PLOT "
    "PORT PREFILL_ROWS PREFILL_STRETCH PREFIX_TOKENS PROMPTS PROMPTS_PER_KIND QUANTIZATION QUICK REDIS_URL REGEX "
    "RESTART ROUNDS RTTS SAMPLING_DEFAULTS SECONDS SEED SERVED_MODEL_NAME SESSIONS SESSION_TTL_S SET SHAPE "
    "SHARE_PREFIXES SHOW_GUESSES STATE_DIR STATE_LAYERS SUFFIX_CERTAINTY SUFFIX_FACTOR SUFFIX_SHARED_TOKENS SUMMARY "
    "SYSTEM SYSTEM_PROMPTS TARGET TEMPERATURE TENANT_STRETCH TENSOR_PARALLEL THREADS TIMEOUT_S TIMES TLS TLS_CA "
    "TLS_CERT TLS_CLIENT_AUTH TLS_KEY TLS_NAME TOGETHER TOKENS TOOL_PARSER TOP_K TOP_P UNROLL VERDICT_TIMEOUT_S "
    "VERIFICATION VERIFIERS VERIFY_PACE VLLM_ARGS VLLM_DTYPE VLLM_PYTHON VOCABULARY WORKER_WAIT_S WRITE_TIMEOUT_S"
)
VARIABLES = frozenset(PREFIX + name for name in _NAMES.split())


def home() -> Path:
    """Return the folder of models and other downloads."""
    try:
        return Path(os.environ.get("OUTRIDER_HOME") or Path.home() / ".cache" / "outrider").expanduser()
    except RuntimeError as error:
        raise StartupError("this user has no home directory: set OUTRIDER_HOME", field="OUTRIDER_HOME") from error


def inherited_environment() -> dict[str, str]:
    """Return the environment of a process whose settings are flags: no OUTRIDER_ variables, no password of Redis."""
    others = (name for name in os.environ if not name.startswith((PREFIX, "REDIS_URL")) or name == "OUTRIDER_HOME")
    return {name: os.environ[name] for name in others}


def redis_url() -> str | None:
    """Return the URL in REDIS_URL, the name that Redis clients share; it may be @FILE."""
    return resolved_redis_url(os.environ.get("REDIS_URL") or "") or None


def resolved_redis_url(text: str) -> str:
    """Return the URL, read from the file of `@FILE`. Raise StartupError, without a URL: it may contain a password."""
    if not text.startswith("@"):
        return text
    if not (url := read_named("redis_url", text[1:]).decode(errors="replace").strip()):
        raise StartupError(f"redis_url: {text[1:]} is empty", field="redis_url", value=text, limit="a URL")
    return url


class Settings(BaseModel):
    """Settings of every service."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all of IPv4, :: for all.")
    port: int = Field(0, ge=0, le=65535, description="Port for gRPC; 0 takes a free one.")
    insecure: bool = Field(False, description="Allow --host other than loopback without keys.")
    max_message_mib: int = Field(32, ge=1, le=512, description="Maximum size of a gRPC message, MiB.")
    max_streams: Int = Field(1024, ge=1, description="Maximum streams per connection, and sessions per shared one.")
    max_connections: Int = Field(1024, ge=1, description="Connections per port; fewer if the descriptor limit says so.")
    open_timeout_s: Seconds = Field(10.0, gt=0, description="Timeout for a stream's first message, seconds.")
    write_timeout_s: Seconds = Field(30.0, gt=0, description="Seconds a peer may take to read before its stream ends.")
    drain_s: Seconds = Field(10.0, ge=0, description="After SIGTERM, time for streams to finish, seconds.")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error.")
    log_json: bool = Field(False, description="Log one JSON object per line instead of text.")
    fleet_key: SecretStr = Field(
        SecretStr(""),
        description="Secret that the services share, or @FILE. Of several, the first is sent and all are accepted.",
    )
    tls_cert: str = Field("", description="PEM file: this service's certificate. With it the service uses TLS only.")
    tls_key: str = Field("", description="PEM file: private key of --tls-cert, unencrypted.")
    tls_ca: str = Field("", description="PEM file: authority of other services' certificates.")
    tls_name: str = Field("", description="Name in all other services' certificates; empty: the host that is called.")
    tls_client_auth: bool = Field(False, description="Require client certificates signed by --tls-ca (mTLS).")
    otlp_endpoint: str = Field("", description="Traces go to this OTLP/HTTP collector, http://host:4318; empty: none.")

    @property
    def own_key(self) -> tuple[str, SecretStr]:
        """Return the setting and the secret that coordinators and this service share."""
        return "fleet_key", self.fleet_key


class DrafterKey(BaseModel):
    """Key of drafters and coordinators, so that drafters do not need the fleet key."""

    drafter_key: SecretStr = Field(
        SecretStr(""),
        description="Secret that registers drafters with coordinators and grants nothing else, or @FILE; empty: the "
        "fleet key.",
    )


class WorkerSettings(Settings):
    """Settings of drafters and verifiers."""

    coordinators: str = Field("", description="host:port of coordinators to register with, separated by commas.")
    advertise: str = Field("", description="host:port at which coordinators reach this worker; empty: its own.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of /metrics for Prometheus, over HTTP; 0: none.")
    metrics_key: SecretStr = Field(SecretStr(""), description="Key that /metrics requires, or @FILE; empty: none.")
    metrics_tls: bool = Field(False, description="Serve /metrics over HTTPS, with --tls-cert.")
    max_sessions: Int = Field(64, ge=1, description="Maximum number of concurrent sessions.")
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$", description="auto, cpu, cuda or cuda:N.")
    dtype: str = Field(
        "auto",
        pattern="^(auto|float32|bfloat16|float16)$",
        description="float32, bfloat16, float16 or auto: on a CPU as they are, else bfloat16.",
    )
    quantization: str = Field("none", pattern="^(none|int8)$", description="none or int8 (weights only, on a CPU).")
    kv_dtype: str = Field(
        "auto",
        pattern="^(auto|float32|bfloat16)$",
        description="Keys and values of engine native: float32 or bfloat16; auto: bfloat16 unless weights are float32.",
    )
    engine: str = Field(
        "auto",
        pattern="^(auto|native|cuda|transformers|mock)$",
        description="What runs the model: auto (the fastest that works), native (CPU kernels), cuda (CUDA graphs), "
        "transformers, or mock (no model, for measuring overhead). A named engine runs, or the start fails.",
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads for the model; 0 lets torch choose.")
    kv_tokens: int = Field(KV_TOKENS, ge=64, le=1 << 28, description="KV cache capacity, tokens of all sessions.")
    prefix_tokens: Int = Field(
        -1, ge=-1, description="Cached tokens of ended sessions to keep; -1: an eighth of --kv-tokens, on CUDA all."
    )
    pace: str = Field("", description="For benchmarks: least time of a step by its tokens, ms, e.g. 1:40,16:40,32:80.")
    blur: str = Field("", description="With --pace: noise added to the logits, by position, e.g. 200:1.5,400:0.")


def command(settings: type[SettingsT], run: Callable[[SettingsT], None], program: str) -> Callable[..., None]:
    """Return a function that typer turns into a command line for `settings`."""

    def entry(**values: Any) -> None:
        _refuse_unknown_variables(settings)
        try:
            made = settings(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise typer.BadParameter(f"{_flag(str(first['loc'][0]))} is {first['input']!r}: {first['msg']}") from error
        try:
            require_keys_or_insecure(made)
            run(made)
        except (OutriderError, OSError) as error:  # such as a folder that cannot be written
            if isinstance(error, ConnectionError | TimeoutError):
                raise  # the trace tells more
            typer.echo(f"{program}: {error}", err=True)
            sys.exit(1)

    parameters = [_parameter(name, field) for name, field in settings.model_fields.items()]
    entry.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    entry.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    entry.__doc__ = settings.__doc__
    return entry


def check_installed(package: str, extra: str) -> None:
    """Raise StartupError where an extra is missing: an install without extras brings what a coordinator needs."""
    if importlib.util.find_spec(package) is None:
        raise StartupError(f"{package} is not installed: pip install '.[{extra}]' in a checkout of Outrider")


def option(flag: str, text: str, **more: Any) -> Any:
    """Return an option with its environment variable, as --max-tokens has OUTRIDER_MAX_TOKENS; envvar=None: none."""
    names = [flag, *more.pop("short", [])]
    first = flag.split("/")[0].removeprefix("--")
    return typer.Option(*names, help=text, **{"envvar": PREFIX + first.upper().replace("-", "_"), **more})


def main(settings: type[SettingsT], run: Callable[[SettingsT], None], program: str) -> None:
    """Run a service from its `__main__`."""
    if sys.stdout:  # None where a supervisor closed it
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # what it lacks, such as ASCII
    if sys.argv[1:] == ["--version"]:
        typer.echo(version("outrider"))
        return
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)  # a local may be a key
    named = {"help_option_names": ["-h", "--help"]}
    app.command(context_settings=named, epilog="--version alone prints the version.")(command(settings, run, program))
    app(prog_name=f"outrider serve {program}")


def require_keys_or_insecure(settings: Settings) -> None:
    """Raise StartupError for a service that is open to the network without keys and without --insecure."""
    asked: SecretStr | None = getattr(settings, "api_keys", None)  # a coordinator requires these of clients
    field, keys = settings.own_key if asked is None else ("api_keys", asked)
    if is_loopback(settings.host) or keys.get_secret_value().strip() or settings.tls_client_auth or settings.insecure:
        return
    problem = f"host is {settings.host} and there are no keys: every caller would be accepted"
    message = f"{problem}; set {_flag(field)}, or --insecure to allow that"
    raise StartupError(message, field=field, value="empty", limit="keys, or --insecure")


def flags(settings: Settings) -> list[str]:
    """Return the settings that differ from the defaults as flags, without secrets: all users can read command lines."""
    line: list[str] = []
    for name, value in settings.model_dump(exclude_defaults=True).items():
        if isinstance(value, bool):
            line.append(_flag(name) if value else f"--no-{_flag(name)[2:]}")
        elif not isinstance(value, SecretStr):
            line += [_flag(name), str(value)]
    return line


def has_secrets(settings: Settings) -> bool:
    return any(isinstance(value, SecretStr) and bool(value.get_secret_value().strip()) for _, value in settings)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    switch = f"/--no-{_flag(name)[2:]}" if field.annotation is bool else ""
    option = typer.Option(_flag(name) + switch, envvar=PREFIX + name.upper(), help=field.description, show_default=True)
    kind, default = (str, "") if field.annotation is SecretStr else (field.annotation, field.default)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refuse_unknown_variables(settings: type[Settings]) -> None:
    """Raise BadParameter for an unknown variable, so that a misspelt one is not silently ignored."""
    known = VARIABLES | {PREFIX + name.upper() for name in settings.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    if unknown:
        raise typer.BadParameter(f"unknown environment variable {unknown[0]}; --help lists the known ones")
