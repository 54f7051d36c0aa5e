"""The drafter service: it proposes tokens beyond the committed position and drops them when the target disagrees."""

from outrider.base.openmp import wait_briefly

wait_briefly()  # before torch is loaded: OpenMP reads its settings once
