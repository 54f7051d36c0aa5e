"""`outrider drafters inspect DIR`: say what a checkpoint is, what it needs of its target and whether it fits."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.models.published_drafters import drafter_folder
from outrider.protocol.errors import OutriderError

if TYPE_CHECKING:
    from drafter.published.loading import PublishedCheckpoint, TargetSize

app = typer.Typer(add_completion=False, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def drafters() -> None:
    """Examine published drafters."""


@app.command()
def inspect(
    name: Annotated[str, typer.Argument(metavar="DIR", help="Folder of the checkpoint, or its hub id.")],
    target: Annotated[str, typer.Option(help="Target to compare with: a directory, a .gguf file, a hub id.")] = "",
) -> None:
    """Say what a checkpoint is, what it needs of its target and, with --target, whether it fits.

    All weights are read and checked. Nothing of the checkpoint is executed.
    """
    from drafter.published.loading import PublishedCheckpoint, TargetSize  # loads torch, which takes seconds

    checkpoint = PublishedCheckpoint.open(drafter_folder(name))
    size = TargetSize.read(target, typer.echo) if target else None
    typer.echo(_description(checkpoint, size))
    if size is not None:
        checkpoint.check_target(size)
        typer.echo(f"fits {target}")


def _description(checkpoint: PublishedCheckpoint, target: TargetSize | None) -> str:
    from drafter.published.module import EMBEDDINGS, HEAD

    module, needs = checkpoint.module, checkpoint.module.needs
    supplied = {EMBEDDINGS: "input embeddings", HEAD: "head"}
    lines = [
        f"format      {checkpoint.format.title}",
        f"parameters  {checkpoint.check_weights():,}",
        f"drafts      {module.draft_vocab:,} of {needs.vocab:,} ids",
        f"needs       hidden size {needs.hidden}, vocabulary size {needs.vocab:,}",
        f"            {_states(checkpoint, target)}",
    ]
    if checkpoint.lacks:
        lines.append(f"            {' and '.join(supplied[name] for name in checkpoint.lacks)} of the target")
    if checkpoint.format.made_for:
        lines.append(f"made for    {checkpoint.format.made_for}")
    return "\n".join(lines)


def _states(checkpoint: PublishedCheckpoint, target: TargetSize | None) -> str:
    needs = checkpoint.module.needs
    if needs.final_state:
        return "the hidden state after the final norm"
    layers = needs.state_layers if target is None else needs.layers_of(target.layers)
    return f"hidden states after the layers {', '.join(map(str, layers)) or '2, half of them, all but 3'}"


def main() -> None:
    """Run the command; print errors without a traceback."""
    try:
        app(prog_name="outrider drafters")
    except (OutriderError, OSError) as error:  # such as a folder that cannot be written
        typer.echo(f"outrider: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
