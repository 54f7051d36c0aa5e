"""A worker whose model hands out the hidden states after some of its layers. Only vLLM imports this module.

The layers are set before the model is compiled and its graphs are captured, as neither can change them.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker import cpu_worker, gpu_worker

from outrider.engine.vllm.messages import LAYERS

_Base: Any = cpu_worker.CPUWorker if current_platform.is_cpu() else gpu_worker.Worker


def _load_model(worker: Any, **kwargs: Any) -> None:
    """Load the model, and ask it for the states of a layer as vLLM does for drafters of its own."""
    _Base.load_model(worker, **kwargs)
    runner = worker.model_runner
    runner.get_model().set_aux_hidden_state_layers(tuple(worker.vllm_config.additional_config[LAYERS]))
    runner.use_aux_hidden_state_outputs = True


CapturingWorker = type("CapturingWorker", (_Base,), {"load_model": _load_model})
