"""The verifier service: it holds the target model, verifies guesses in batched steps, and commits tokens."""

from outrider.base.openmp import wait_briefly

wait_briefly()  # before torch is loaded: OpenMP reads its settings once
