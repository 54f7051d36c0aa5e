"""Process of another engine that answers one prompt at a time over a pipe.

`peers` starts this file with an interpreter that has the engine; Outrider need not be installed there. It needs the
standard library, and torch with transformers, or vllm, or llama_cpp. Each message is one line with a JSON object.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Maps a request to its answer, both as on the pipe.
Answer = Callable[[dict[str, Any]], dict[str, Any]]


class _Clock:
    """Arrival times of tokens, with the interface of a transformers streamer."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.times: list[tuple[int, float]] = []  # number of tokens, seconds since the request
        self._prompt_seen = False

    def reached(self, count: int) -> None:
        if count > (self.times[-1][0] if self.times else 0):
            self.times.append((count, time.perf_counter() - self.began))

    def put(self, tokens: Any) -> None:
        if self._prompt_seen:  # the first call carries the prompt
            self.reached((self.times[-1][0] if self.times else 0) + tokens.numel())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def _transformers(spec: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    dtype = getattr(torch, spec["dtype"])
    told = transformers.AutoConfig.from_pretrained(spec["model"], trust_remote_code=False)
    texts_alone = type(told) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING  # others see images, and answer texts as well
    kind = transformers.AutoModelForCausalLM if texts_alone else transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(spec["model"], dtype=dtype, use_safetensors=True, trust_remote_code=False)
    model = model.to(spec["device"]).eval()
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    early_exit = spec["early_exit"] or max(1, layers // 3)
    if early_exit > layers:
        raise ValueError(f"--early-exit is {early_exit}, must be at most {layers}, the layers of this model")
    ways = {"plain": {}, "lookup": {"prompt_lookup_num_tokens": 10}, "early_exit": {"assistant_early_exit": early_exit}}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        prompt = torch.tensor([request["prompt"]], device=spec["device"])
        end = request["eos"]
        clock = _Clock()
        try:
            output = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request["max_tokens"],
                do_sample=False,
                eos_token_id=end or None,
                pad_token_id=end[0] if end else 0,
                streamer=clock,
                **ways[request["way"]],
            )
        finally:
            config.num_hidden_layers = layers  # a failed early exit leaves it shortened
        return {"tokens": output[0, prompt.shape[1] :].tolist(), "times": clock.times}

    return {"version": transformers.__version__, "early_exit": early_exit}, answer


def _vllm(spec: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    vllm = importlib.import_module("vllm")
    # Without a shortest match it would equal the longest, and guesses would be rare.
    guesses = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    engine = vllm.LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        max_model_len=spec["context"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=guesses if spec["way"] == "ngram" else None,
    ).llm_engine
    count = 0

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal count
        count += 1
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=request["max_tokens"], stop_token_ids=request["eos"], detokenize=False
        )
        tokens: list[int] = []
        clock = _Clock()
        # Step by step instead of `generate`, to time the first token.
        engine.add_request(str(count), {"type": "token", "prompt_token_ids": request["prompt"]}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
                clock.reached(len(tokens))
        return {"tokens": tokens, "times": clock.times}

    return {"version": vllm.__version__}, answer


def _llama(spec: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    llama_cpp = importlib.import_module("llama_cpp")
    lookup = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
    threads = spec["threads"] or len(os.sched_getaffinity(0))
    engine = llama_cpp.Llama(
        spec["model"],
        n_ctx=spec["context"],
        n_threads=threads,
        n_threads_batch=threads,  # also of steps that check guesses
        draft_model=lookup(num_pred_tokens=10) if spec["way"] == "lookup" else None,
        flash_attn=True,
        verbose=False,
    )

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        engine.reset()  # otherwise it would keep the keys and values of an equal prompt
        tokens: list[int] = []
        clock = _Clock()
        for token in engine.generate(request["prompt"], temp=0.0):
            tokens.append(token)
            clock.reached(len(tokens))
            if token in request["eos"] or len(tokens) == request["max_tokens"]:
                break
        return {"tokens": tokens, "times": clock.times}

    return {"version": llama_cpp.__version__}, answer


_ENGINES = {"transformers": _transformers, "vllm": _vllm, "llama.cpp": _llama}


def main() -> None:
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to stdout, and the pipe must carry answers only

    def send(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    spec = json.loads(sys.argv[1])
    try:
        about, answer = _ENGINES[spec["engine"]](spec)
    except Exception as error:  # any error of the engine is reported to the parent
        send({"error": _message(error)})
        sys.exit(1)
    send(about)
    for line in sys.stdin:
        try:
            send(answer(json.loads(line)))
        except Exception as error:
            send({"error": _message(error)})


def _message(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    main()
