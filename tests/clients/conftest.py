"""What the tests of clients share: tools, and the address of a cluster."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, Literal

import httpx2 as httpx
import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict

from tests.cluster import Cluster

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet for prices
collect_ignore_glob = [] if all(map(find_spec, ("anthropic", "langchain_openai", "litellm"))) else ["test_*.py"]


class Weather(BaseModel):
    """Weather of a day."""

    model_config = ConfigDict(extra="forbid")  # a model of noise would not stop adding fields
    unit: Literal["celsius", "kelvin"]
    sunny: bool


class Switch(BaseModel):
    """Turn a lamp on or off."""

    on: bool


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": kind.__name__, "description": kind.__doc__, "parameters": schema}}
    for kind in (Weather, Switch)
    if (schema := kind.model_json_schema() | {"additionalProperties": False})
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
QUESTION = "How is the weather?"


def check(name: str, arguments: Any) -> None:
    jsonschema.validate(arguments, SCHEMAS[name])


def called(base: str, seed: int) -> dict[str, Any]:
    """Options with which about half of the seeds call a tool once: the target is noise, and "n" begins the name."""
    [letter] = httpx.post(f"{base.removesuffix('/v1')}/tokenize", json={"prompt": "n"}).json()["tokens"]
    return {"seed": seed, "logit_bias": {str(letter): 20 * (seed % 2)}, "parallel_tool_calls": False}


@pytest.fixture(scope="session")
def base(cluster: Cluster) -> str:
    return f"{cluster.coordinators[0].web}/v1"
