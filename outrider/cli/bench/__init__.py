"""`outrider bench`: measurements, each of what it starts itself."""

from outrider.cli.bench.capacity import capacity
from outrider.cli.bench.drafters import drafters
from outrider.cli.bench.engine import engine
from outrider.cli.bench.network import network
from outrider.cli.bench.overhead import overhead

__all__ = ["capacity", "drafters", "engine", "network", "overhead"]
