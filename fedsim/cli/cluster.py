"""Commands for a Ray cluster on this machine that outlives a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.shared import AsJson, err, out

app = typer.Typer()

cluster = typer.Typer(help="A Ray on this machine that stays up between runs.")
app.add_typer(cluster, name="cluster")

State = Annotated[
    Path | None,
    typer.Option("--state", help="Where the nodes' processes are kept; else the cache."),
]
Cpus = Annotated[int | None, typer.Option(min=0, help="CPUs of each node; else all.")]
AttackRoom = Annotated[int, typer.Option("--attack", min=0, help="Attack workers on each node.")]


@cluster.command("up")
def up(
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes, the head counted.")] = 1,
    cpus: Cpus = None,
    attack: AttackRoom = 1,
    port: Annotated[int | None, typer.Option(min=1024, max=65535, help="Else a free one.")] = None,
    state: State = None,
) -> None:
    """Start a cluster, and say what to put into a spec."""
    from fedsim.cluster.local import start, state_file

    with err.status("starting Ray"):
        made = start(state or state_file(), nodes=nodes, cpus=cpus, attack=attack, port=port)
    out.print(f"engine.address={made.address}", highlight=False)


@cluster.command("add")
def add(cpus: Cpus = None, attack: AttackRoom = 1, state: State = None) -> None:
    """Start one node more; a run that has workers waiting for room takes it up."""
    from fedsim.cluster.local import add as add_node
    from fedsim.cluster.local import state_file

    with err.status("starting a node"):
        made = add_node(state or state_file(), cpus=cpus, attack=attack)
    out.print(f"{len(made.nodes)} nodes at {made.address}", highlight=False)


@cluster.command("down")
def down(state: State = None) -> None:
    """End the nodes that `up` and `add` started, and no other process."""
    from fedsim.cluster.local import state_file, stop

    with err.status("ending Ray"):
        ended = stop(state or state_file())
    out.print(f"{ended} {'node' if ended == 1 else 'nodes'} ended", highlight=False)


@cluster.command("status")
def status(state: State = None, as_json: AsJson = False) -> None:
    """Which nodes are up, and what they offer."""
    from fedsim.cluster.local import answering, read, running, state_file

    known = read(state or state_file())
    nodes = answering(known.address) if known is not None and running(known) else []
    if as_json:
        address = known.address if known is not None else None
        print(json.dumps({"address": address, "nodes": nodes}, indent=2))
        return
    if known is None:
        out.print("no cluster was started here", highlight=False)
        return
    out.print(
        f"{known.address}: {len(running(known))} of {len(known.nodes)} nodes run", highlight=False
    )
    for node in nodes:
        offers = ", ".join(f"{node['resources'].get(kind, 0):g} {kind}" for kind in OFFERS)
        out.print(f"  {node['id'][:8]}: {offers}", highlight=False)


OFFERS = ("CPU", "GPU", "attack")
