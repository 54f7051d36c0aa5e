"""`outrider bench`: measurements, each with processes that it starts itself. The service images omit this package."""

import typer

from outrider.bench.capacity.command import capacity as capacity_command
from outrider.bench.drafters.command import drafters as drafters_command
from outrider.bench.engine.command import engine as engine_command
from outrider.bench.network.command import network as network_command
from outrider.bench.overhead.command import overhead as overhead_command

app = typer.Typer(help="Benchmarks.", no_args_is_help=True)
for command in (overhead_command, engine_command, drafters_command, network_command, capacity_command):
    app.command()(command)
