"""Tensor parallelism: one model over several processes (ranks), each with a share of every layer.

Rank 0 is the process that the operator starts, and it alone serves. It starts the other ranks, unless torchrun has. Its
`TensorParallelEngine` broadcasts every call that changes the cache, and the other ranks repeat the calls in the same
order (`run_follower`). Sessions and blocks therefore agree on all ranks without being sent. transformers does the
communication within layers.
"""

from outrider.engine.tensor_parallel.engine import TensorParallelEngine, run_follower
from outrider.engine.tensor_parallel.joining import join_ranks
from outrider.engine.tensor_parallel.ranks import RankGroup

__all__ = ["RankGroup", "TensorParallelEngine", "join_ranks", "run_follower"]
