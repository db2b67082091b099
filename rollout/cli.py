"""The command line: `python -m rollout serve | check | info | stats | top | keys`.

Options of `serve` are those of `ServiceConfig`. With `--json`, what ends, ends with one JSON line on standard output;
logs and human text for a running service go to standard error.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout.client.blocking import connect
from rollout.config import ServiceConfig
from rollout.environment_report import Finding, environment_report
from rollout.errors import RolloutError, error_fields, error_from_fields
from rollout.key_commands import app as keys_app
from rollout.keys import LOCAL, KeyFolder
from rollout.service.engine_host import checked_options
from rollout.service.logs import set_up_logging
from rollout.wire.security import is_own_machine, parse_address


def _loaded_when_used(name: str) -> ModuleType:
    """Return a module that is executed when something of it is asked for first."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from rollout import serve_options
else:
    # The defaults that it shows are the engine's: they are read when a command runs, not when this is imported.
    serve_options = _loaded_when_used("rollout.serve_options")

app = typer.Typer(
    name="rollout", help="A rollout service for agentic RL.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.add_typer(keys_app)

log = logging.getLogger(__name__)

SNIPPET = """The service runs at {address}
Paste this into a script or a notebook:

    import rollout
    client = rollout.connect({argument})
    print(client.generate([1, 2, 3], max_new_tokens=16).ids)

Stop it with Ctrl-C."""


Json = Annotated[bool, typer.Option("--json", help="Print one JSON line at the end.")]
Address = Annotated[str | None, typer.Option(help="Address of the service; without it, the one that the state folder announces.")]

Key = Annotated[str | None, typer.Option(help="Key file for an encrypted service.", show_default="found in the state folder")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Use a network address without encryption.")]


def _print_json(fields: Mapping[str, object]) -> None:
    print(json.dumps(fields, default=str), flush=True)


def _refuse(error: RolloutError, as_json: bool) -> typer.Exit:
    """Print an error, with flags for names of options, and return the exit to raise."""
    if as_json:
        _print_json({"event": "failed", "error": error_fields(error)})
    else:
        typer.echo(f"error: {_with_flags(str(error), error.field)}", err=True)
    return typer.Exit(1)


def _with_flags(text: str, field: str | None) -> str:
    """Name an option as this command line does, where a message gives its value or says what to do with it."""
    if field is None or field not in (*ServiceConfig.__dataclass_fields__, "timeout_s"):
        return text
    places = rf"\b{field}(?==)|(?<=change ){field}\b|(?<=set ){field}\b|(?<=leave ){field}\b|(?<=lower ){field}\b"
    return re.sub(places, f"--{field.replace('_', '-')}", text)


def _arguments_to_connect(config: ServiceConfig, address: str, *, named: bool, keyless: bool) -> str:
    """Return what a client on this machine passes to `connect`: nothing where the state folder says it all."""
    found = parse_address(address)
    said = [json.dumps(address)] if named else []
    if found.scheme == "tcp" and config.insecure:
        said += [] if is_own_machine(found.host) else ["insecure=True"]
    elif found.scheme == "tcp" and not keyless:
        # A client that does not know this state folder finds no key by itself.
        said.append(f"key={json.dumps(str(KeyFolder(config.state.keys).path(LOCAL)))}")
    return ", ".join(said)


@app.command()
def serve(
    model: serve_options.Model,
    address: serve_options.Address = None,
    dtype: serve_options.Dtype = None,
    device: serve_options.Device = None,
    max_rows: serve_options.MaxRows = None,
    page_size: serve_options.PageSize = None,
    num_pages: serve_options.NumPages = None,
    max_model_len: serve_options.MaxModelLen = None,
    max_prefill_tokens: serve_options.MaxPrefillTokens = None,
    run_ahead: serve_options.RunAhead = None,
    decode_tables: serve_options.DecodeTables = None,
    sampling_slots: serve_options.SamplingSlots = None,
    gpu_memory_fraction: serve_options.GpuMemoryFraction = None,
    hint_share: serve_options.HintShare = None,
    result_transport: serve_options.ResultTransport = None,
    weight_staging: serve_options.WeightStaging = None,
    canary_tolerance: serve_options.CanaryTolerance = None,
    canary_mean_tolerance: serve_options.CanaryMeanTolerance = None,
    graphs: serve_options.Graphs = None,
    load_format: serve_options.LoadFormat = None,
    kept_ids: serve_options.KeptIds = None,
    tp: serve_options.TensorParallel = None,
    rank_timeout_s: serve_options.RankTimeoutS = None,
    seed: serve_options.Seed = None,
    threads: serve_options.Threads = None,
    weights_dir: serve_options.WeightsDir = None,
    keep_last: serve_options.KeepLast = None,
    state_dir: serve_options.StateDir = None,
    lease_s: serve_options.LeaseS = 30.0,
    max_requests: serve_options.MaxRequests = 16_384,
    max_client_requests: serve_options.MaxClientRequests = None,
    host_timeout_s: serve_options.HostTimeoutS = 120.0,
    drain_s: serve_options.DrainS = 10.0,
    metrics_port: serve_options.MetricsPort = None,
    log_format: serve_options.LogFormat = "text",
    insecure: serve_options.Insecure = False,
    as_json: serve_options.ServeJson = False,
) -> None:
    """Serve a model until stopped."""
    given = {name: value for name, value in locals().items() if name != "as_json"}
    _serve(given, as_json=as_json)


def _serve(options: Mapping[str, Any], *, as_json: bool) -> None:
    from rollout.service.front import serve as run_service

    address, state_dir = options["address"], options["state_dir"]

    def on_event(event: str, fields: Mapping[str, object]) -> None:
        if as_json:
            _print_json({"event": event, **fields})
        if event == "ready":
            argument = _arguments_to_connect(config, str(fields["address"]), named=bool(address or state_dir), keyless=not state_dir)
            said = SNIPPET.format(address=fields["address"], argument=argument)
            if fields.get("metrics"):
                said += f"\nMetrics for Prometheus: {fields['metrics']}"
            print(said, file=sys.stderr if as_json else sys.stdout, flush=True)

    try:
        config = ServiceConfig.from_fields(options)
        set_up_logging("front", config.log_format)
        checked_options(config.engine_arguments())
        log.info("loading %s; a snippet for clients follows once it is ready", config.model)
        error = run_service(config, on_event)
    except ValueError as refused:
        # The engine has an error tree of its own, with the same parts.
        if not hasattr(refused, "what"):
            raise
        raise _refuse(error_from_fields(error_fields(refused)), as_json) from None
    except RolloutError as refused:
        raise _refuse(refused, as_json) from None
    if error is not None:
        raise typer.Exit(1) if as_json else _refuse(error, as_json)
    if as_json:
        _print_json({"event": "stopped"})
    else:
        typer.echo("The service has stopped.")


@app.command()
def check(
    template: Annotated[
        str | None,
        typer.Option(help="Folder of a model: prove instead that its chat template leaves earlier turns as they were.", metavar="MODEL"),
    ] = None,
    history: Annotated[str, typer.Option(help="With --template: template or append, as episodes will be told.")] = "template",
    template_options: Annotated[
        str, typer.Option(help="With --template: what the template is passed, as JSON.", show_default="{}", metavar="JSON")
    ] = "{}",
    as_json: Json = False,
) -> None:
    """Report on this environment, or on a model's chat template, with a remedy for whatever is wrong."""
    if template is None:
        findings = environment_report()
        extra: dict[str, object] = {}
    else:
        append_only, findings = _template_findings(template, history, template_options, as_json)
        extra = {"append_only": append_only}
    failed = [finding for finding in findings if finding.ok is False] or (template is not None and not extra["append_only"])
    if as_json:
        _print_json({"ok": not failed, **extra, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        _show_findings(findings)
    if failed:
        raise typer.Exit(1)


def _show_findings(findings: Sequence[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark, colour = {True: ("ok", "green"), False: ("fix", "red"), None: ("note", None)}[finding.ok]
        remedy = f"; remedy: {finding.remedy}" if finding.remedy else ""
        typer.echo(f"{typer.style(f'{mark:<4}', fg=colour)}  {finding.name:<{width}}  {finding.value}{remedy}")


def _template_findings(folder: str, history: str, options: str, as_json: bool) -> tuple[bool, list[Finding]]:
    from rollout.agent.template_check import template_findings

    try:
        passed = json.loads(options)
    except ValueError as error:
        passed = error
    if not isinstance(passed, dict):
        raise typer.BadParameter(f"{options!r} is no JSON object", param_hint="--template-options")
    try:
        return template_findings(folder, history=history, template_kwargs=passed)
    except RolloutError as error:
        raise _refuse(error, as_json) from None


def _ask(what: str, address: str | None, *, key: str | None, insecure: bool, timeout_s: float, as_json: bool) -> dict[str, Any]:
    try:
        with connect(address, timeout_s=timeout_s, name="command line", key=key, insecure=insecure) as client:
            return client.stats() if what == "stats" else dataclasses.asdict(client.info())
    except RolloutError as error:
        raise _refuse(error, as_json) from None


def _show(fields: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        _print_json(fields)
        return
    rows: list[tuple[str, object]] = []
    for name, value in fields.items():
        rows += [(f"{name}.{inner}", one) for inner, one in value.items()] if isinstance(value, dict) else [(name, value)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        # Never wrapped or cut: paths and addresses are there to be copied.
        typer.echo(f"{name:<{width}}  {_shown(value)}")


def _shown(value: object) -> str:
    """Return a value as people read it: no brackets, no quotes, no digits beyond the sixth."""
    if value is None or value in ("", (), []):
        return "-"
    if isinstance(value, list | tuple):
        return ", ".join(_shown(one) for one in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@app.command()
def info(
    address: Address = None,
    key: Key = None,
    insecure: Insecure = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Say what a running service is."""
    _show(_ask("info", address, key=key, insecure=insecure, timeout_s=timeout_s, as_json=as_json), as_json)


@app.command()
def stats(
    address: Address = None,
    key: Key = None,
    insecure: Insecure = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Print a running service's counters and gauges."""
    _show(_ask("stats", address, key=key, insecure=insecure, timeout_s=timeout_s, as_json=as_json), as_json)


@app.command()
def top(
    address: Address = None,
    key: Key = None,
    insecure: Insecure = False,
    interval_s: Annotated[float, typer.Option(help="Seconds between two pictures.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait.")] = 5.0,
) -> None:
    """Watch a running service; Ctrl-C ends it."""
    from rollout.top import show

    try:
        with connect(address, timeout_s=timeout_s, name="top", key=key, insecure=insecure) as client:
            show(client, interval_s, once=once)
    except KeyboardInterrupt:
        pass
    except RolloutError as error:
        raise _refuse(error, False) from None


def main() -> None:
    """Run the command line."""
    app()
