"""`python -m rollout keys new | rotate | revoke | list`: the keys of encrypted connections, from the command line.

Works on the state folder's key folder; a running service follows within a second. Nothing here prints a secret.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from rollout.errors import RolloutError, error_fields
from rollout.keys import SERVICE, KeyFolder
from rollout.state import StateFolder, default_state_dir, private_folder

app = typer.Typer(name="keys", help="Keys of encrypted connections: who may connect to a service.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="What the key is called.")]
StateDir = Annotated[str | None, typer.Option(help="State folder.", show_default="ARENO_STATE_DIR, else the user's")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON line at the end.")]
Done = TypeVar("Done")


def _run(change: Callable[[KeyFolder], Done], state_dir: str | None, as_json: bool) -> Done:
    """Do something with the key folder; an error ends the command."""
    root = default_state_dir() if state_dir is None else Path(state_dir).absolute()
    try:
        return change(KeyFolder(StateFolder(private_folder(root)).keys))
    except RolloutError as error:
        if as_json:
            print(json.dumps({"event": "failed", "error": error_fields(error)}, default=str), flush=True)
        else:
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _tell(fields: dict[str, object], text: str, as_json: bool) -> None:
    typer.echo(json.dumps(fields) if as_json else text)


@app.command()
def new(
    name: Name,
    data_only: Annotated[bool, typer.Option("--data-only", help="It may not pause, push weights or stop the service.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Make a key and let it connect."""
    path = _run(lambda folder: folder.new(name, control=not data_only), state_dir, as_json)
    text = (
        f"{path}\nCopy this file to the client's machine, over a channel that nobody reads, and connect with\n"
        f'    rollout.connect("tcp://HOST:PORT", key="{path.name}")'
    )
    _tell({"event": "made", "name": name, "file": str(path), "control": not data_only}, text, as_json)


@app.command()
def rotate(name: Name, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Replace a key; sessions of the old one end. The name `service` stands for the service's own key."""
    path = _run(lambda folder: folder.rotate(name), state_dir, as_json)
    after = "It counts from the service's next start on; copy the clients' files anew then." if name == SERVICE else "Copy this file anew."
    _tell({"event": "rotated", "name": name, "file": str(path)}, f"{path}\n{after}", as_json)


@app.command()
def revoke(name: Name, state_dir: StateDir = None, as_json: Json = False) -> None:
    """Take a key away; its sessions end and their requests are cancelled."""
    _run(lambda folder: folder.revoke(name), state_dir, as_json)
    _tell({"event": "revoked", "name": name}, f"{name} may not connect any more.", as_json)


@app.command(name="list")
def list_keys(state_dir: StateDir = None, as_json: Json = False) -> None:
    """Show who may connect: names, rights, public keys."""
    keys = _run(lambda folder: sorted(folder.allowed().values(), key=lambda key: key.name), state_dir, as_json)
    if as_json:
        typer.echo(json.dumps({"clients": [asdict(key) for key in keys]}))
        return
    for key in keys:
        typer.echo(f"{key.name:<24}  {'data, control' if key.control else 'data':<13}  {key.created}  {key.public}")
    if not keys:
        typer.echo("There are no keys; `python -m rollout keys new NAME` makes one.")
