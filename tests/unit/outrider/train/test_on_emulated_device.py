"""Training on an emulated CUDA device, and the drafters that come of it on the device and on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from drafter.interface import Drafter, DraftRequest
from drafter.methods import eagle, early_exit, medusa, model
from outrider.engine import SessionTokens
from outrider.engine.loading.loader import load_model
from outrider.engine.loading.options import EngineOptions
from outrider.protocol.hidden_states.messages import HiddenStates
from outrider.protocol.sampling_params import SamplingParams, Verification
from outrider.protocol.speculation import Guess
from outrider.settings.drafter import DrafterSettings
from outrider.testing.toy_models import make_model
from outrider.train import data, loop, run
from outrider.train.run import METHODS, TrainingOrder
from tests.emulated_cuda import emulated_cuda

DRAFTERS = {"eagle": eagle.make, "medusa": medusa.make, "early-exit": early_exit.make, "model": model.make}
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, repetition_penalty=1.2, logit_bias={7: 1.5}),
    SamplingParams(temperature=0.9, seed=3, verification=Verification.REJECTION),
)
PROMPT = list(range(40, 52))


class _Silent:
    def on_status(self, text: str) -> None: ...

    def on_data(self, what: str, progress: data.DataProgress) -> None: ...

    def on_step(self, report: loop.Report) -> None: ...


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> TrainingOrder:
    folder = tmp_path_factory.mktemp("training")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say {i} things."}) + "\n" for i in range(8)))
    return TrainingOrder(
        method="eagle",
        target=str(make_model(folder / "target", seed=7)),
        out=folder / "eagle",
        prompts=prompts,
        max_tokens=12,
        learn_tokens=1_500,
        num_ids=64,
        exit_layers=1,
        hidden=64,
        device="cuda",
        data_home=folder / "data",
    )


@pytest.mark.parametrize("method", METHODS)
def test_training_runs_on_the_device(order: TrainingOrder, method: str) -> None:
    with emulated_cuda() as device:
        card = run.train(replace(order, method=method, out=order.out.with_name(method)), _Silent())
    assert card.training["device"] == "cuda"
    assert card.training["tokens"] >= order.learn_tokens
    assert device.counts.launches["_foreach_addcdiv_"] + device.counts.launches["addcdiv_"] > 0, "no step was taken"


@pytest.fixture(scope="module")
def models(order: TrainingOrder) -> dict[str, str]:
    """Return the model of each drafter, trained on the CPU."""
    folders = {method: order.out.with_name(f"cpu-{method}") for method in DRAFTERS if method in METHODS}
    for method, folder in folders.items():
        run.train(replace(order, method=method, out=folder, device="cpu"), _Silent())
    return {method: str(folders.get(method, order.target)) for method in DRAFTERS}


def _hidden_states(order: TrainingOrder) -> HiddenStates:
    engine = load_model(order.target, EngineOptions(device="cpu")).engine
    states = engine.extend([SessionTokens("s", PROMPT, hidden_from=0)]).hidden_states[0][:-1]
    return HiddenStates(0, states.shape[1], np.ascontiguousarray(states.numpy().astype("<f2")).tobytes())


def _drafts(drafter: Drafter, states: HiddenStates) -> list[Guess]:
    """Return chains and trees from the same states; guesses that are drawn from an own distribution are chains."""
    drafts = []
    for params in PARAMS:
        for more in ({}, {"branches": 2, "budget": 6, "depth": 3})[: 1 if params.mode.needs_draft_probs else 2]:
            request = DraftRequest(
                "s", PROMPT, len(PROMPT), len(PROMPT), 3, params, 257, hidden_states=(states,), **more
            )
            drafts += drafter.draft([request])
            drafter.forget("s")
    return drafts


def _without_weights(draft: Guess) -> tuple[Guess, list[tuple[int, ...]]]:
    return replace(draft, draft_probs=()), [each.ids for each in draft.draft_probs]


@pytest.mark.parametrize("method", DRAFTERS)
def test_a_drafter_drafts_on_the_device_as_on_the_cpu(
    order: TrainingOrder, models: dict[str, str], method: str
) -> None:
    states = _hidden_states(order)

    def drafts(device: str, dtype: str) -> list[Guess]:
        settings = DrafterSettings(
            kind=method, target=order.target, model=models[method], device=device, dtype=dtype, kv_tokens=512
        )
        return _drafts(DRAFTERS[method](settings, lambda _: None), states)

    wanted = drafts("cpu", "float32")
    assert all(draft.tokens for draft in wanted)
    with emulated_cuda() as device:
        found = drafts("cuda", "float32")
        assert all(draft.tokens for draft in drafts("cuda", "auto"))
    assert [_without_weights(draft) for draft in found] == [_without_weights(draft) for draft in wanted]
    for draft, same in zip(found, wanted, strict=True):  # torch's sums differ between processors in the last bits
        for one, other in zip(draft.draft_probs, same.draft_probs, strict=True):
            assert max(abs(a - b) for a, b in zip(one.weights, other.weights, strict=True)) <= 1
    assert device.counts.launches["mm"] + device.counts.launches["addmm"] > 0
