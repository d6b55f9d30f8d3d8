"""Commands for a real Flower deployment: keys, shards, deploy, the score once it is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedsim import default_output
from fedsim.cli.shared import (
    AsJson,
    Overrides,
    Trust,
    checked_spec,
    err,
    opened,
    out,
    styled,
    tell_events,
    tell_verdicts,
    watch_for,
)
from fedsim.core.errors import SpecError
from fedsim.core.run import Run

app = typer.Typer()


@app.command()
def deploy(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="A YAML file.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The deployment's directory.")],
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="SuperNodes; as data.clients if left out.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS, no node authentication; loopback only.")
    ] = False,
    keys: Annotated[
        Path | None, typer.Option(help="A folder of `fedsim keys`; else made in DIR/keys.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rounds and attacks on a real SuperLink and SuperNodes, as processes on this machine."""
    from fedsim.deploy.deployment import carry_out, open_to, set_up

    if insecure and keys is not None:
        raise SpecError("--insecure takes no keys; leave one of the two out.")
    changes = [*(overrides or []), *([f"data.clients={nodes}"] if nodes else [])]
    checked = checked_spec(spec, changes)
    if sentence := open_to():
        err.print(styled(("note:", "yellow"), f" {sentence}"), soft_wrap=True)
    ready = set_up(checked, output, insecure=insecure, keys=keys)
    with ready as done, err.status("federation under way"):
        carry_out(done)
    run = Run.open(done.run)
    vaults = [str(node.vault) for node in done.nodes]
    if as_json:
        rows = json.loads(run.rounds.to_json(orient="records"))
        about = {"run": str(run.root), "rounds": rows, "vaults": vaults, "scored": str(done.scored)}
        print(json.dumps(about, indent=2))
        return
    tell_events(run.events())
    gathered = " ".join(f"--vault {vault}" for vault in vaults)
    out.print(f"run: {run.root}", soft_wrap=True, highlight=False)
    words = f"score it: fedsim score {run.root} {gathered} -o {done.scored}"
    out.print(words, soft_wrap=True, highlight=False)


@app.command()
def score(
    directory: Annotated[Path, typer.Argument(help="The run directory of a deployment.")],
    vault: Annotated[list[Path], typer.Option("--vault", help="A client's vault; repeat it.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="A directory of your own, away from the server's."),
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """A deployed run and its clients' vaults in a directory of your own: scores, verdict, report.

    The server's side gets nothing of it; `fedsim report` takes that directory."""
    from fedsim.audit.stages import conclude
    from fedsim.deploy.scorer import gather

    served = opened(directory, trust)
    default = default_output(served.spec)
    run = gather(served, vault, output or default.with_name(f"{default.name}-scored"))
    if served.vault.exists():
        words = f" the server's side reads the truth in '{served.vault}'; delete it."
        err.print(styled(("note:", "yellow"), words), soft_wrap=True)
    with run.locked():
        path = conclude(run, watch=watch_for(as_json))
    if as_json:
        print(json.dumps(run.summary, indent=2))
        return
    tell_verdicts(run.summary)
    out.print(f"report: {path}", soft_wrap=True, highlight=False)


@app.command()
def keys(
    directory: Annotated[Path, typer.Argument(help="Where to; keys that are there are kept.")],
    nodes: Annotated[int, typer.Option(min=0, help="SuperNodes to make keys for.")] = 4,
    host: Annotated[
        list[str] | None, typer.Option(help="Names and addresses of the SuperLink; repeat it.")
    ] = None,
) -> None:
    """An authority, the SuperLink's certificate and a key for every SuperNode."""
    from fedsim.deploy.keys import HOSTS, check_keys, make_keys

    made = make_keys(directory, nodes, tuple(host or HOSTS))
    check_keys(made, nodes)
    out.print(f"keys: {made.root}", soft_wrap=True, highlight=False)


@app.command()
def deal(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="A YAML file.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="DIR/0 is for client 0.")],
    overrides: Overrides = None,
) -> None:
    """Write for every client the pictures that it holds, into a folder each."""
    from fedsim.clients.dealing import PUBLIC, write_public
    from fedsim.clients.dealing import deal as hand_out

    checked = checked_spec(spec, overrides)
    hand_out(checked, [output / str(client) for client in range(checked.data.clients)])
    write_public(output / PUBLIC, checked)
    last = checked.data.clients - 1
    out.print(f"dealt: {output}/0 to {output}/{last}", soft_wrap=True, highlight=False)
    out.print(f"for the server: {output / PUBLIC}", soft_wrap=True, highlight=False)


Address = Annotated[str, typer.Argument(metavar="HOST:PORT", help="The SuperLink.")]
Authority = Annotated[Path, typer.Option("--ca", help="The authority's certificate.")]


@app.command()
def register(
    superlink: Address,
    publics: Annotated[list[Path], typer.Argument(metavar="KEY...", help="Public keys.")],
    authority: Authority,
) -> None:
    """Let SuperNodes in, by their public keys; those that are known stay so."""
    from fedsim.deploy.deployment import register as let_in

    let_in(superlink, authority, publics)
    out.print(f"registered: {len(publics)}", highlight=False)


@app.command()
def submit(
    superlink: Address,
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="As the SuperLink sees it.")],
    authority: Authority,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The run's directory, as the SuperLink sees it.")
    ],
    public: Annotated[
        Path | None,
        typer.Option(help="What `fedsim deal` wrote for the server, as the SuperLink sees it."),
    ] = None,
    attack: Annotated[
        bool, typer.Option(help="Attack in the server app itself once the rounds are done.")
    ] = True,
) -> None:
    """Have a SuperLink that is up run a spec, and wait for it."""
    from fedsim.deploy.deployment import submit as hand_over

    hand_over(superlink, authority, spec, output, public=public, attack=attack)
    out.print(f"run: {output}", soft_wrap=True, highlight=False)


@app.command()
def front(
    listen: Annotated[str, typer.Argument(metavar="HOST:PORT", help="What nodes are told.")],
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The SuperLink.")],
    authority: Authority,
    certificate: Annotated[Path, typer.Option(help="What nodes are shown; signed by the CA.")],
    key: Annotated[Path, typer.Option(help="The certificate's private key.")],
) -> None:
    """Pass the calls of SuperNodes to a SuperLink, and no others, until it is stopped."""
    from fedsim.deploy.front import serve
    from fedsim.deploy.keys import check_server

    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise SpecError(f"'{listen}' is no address; write HOST:PORT.")
    check_server(authority, certificate, key)
    out.print(f"SuperNodes: --superlink {listen}", soft_wrap=True, highlight=False)
    serve(host, int(port), superlink, authority=authority, certificate=certificate, key=key)


@app.command("attack-captured")
def attack_captured(
    directory: Annotated[Path, typer.Argument(help="The run directory of a deployment.")],
    trust: Trust = False,
) -> None:
    """The attacks of a deployed run, on what its server captured; no score."""
    from fedsim.audit.stages import attack_captured as conduct

    run = conduct(directory, watch=watch_for(False), trust=trust)
    tell_events(run.events())
    out.print(f"reconstructions: {run.reconstructions}", soft_wrap=True, highlight=False)
