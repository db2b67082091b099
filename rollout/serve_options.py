"""The options of `python -m rollout serve`: a type, a help text and the default that is shown, for each option of `ServiceConfig`.

An option table: one alias for each parameter of `rollout.cli.serve`, which reads them and nothing else does.
"""

from __future__ import annotations

from typing import Annotated

import typer

from rollout.config import default_threads
from rollout.service.engine_host import option_default

Model = Annotated[str, typer.Option(help="Folder of the model (Hugging Face layout).")]
Address = Annotated[
    str | None,
    typer.Option(
        help="ipc:///path, tcp://HOST:PORT or tcp://[IPv6]:PORT; TCP is encrypted.", show_default="a local socket in the state folder"
    ),
]
Dtype = Annotated[str | None, typer.Option(help="float32 or bfloat16.", show_default="float32 on the CPU, bfloat16 on CUDA")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.", show_default=option_default("device"))]
MaxRows = Annotated[int | None, typer.Option(help="Requests that decode at the same time.", show_default="64 on the CPU, 256 on CUDA")]
PageSize = Annotated[int | None, typer.Option(help="Tokens in a KV page.", show_default="16 on the CPU, 64 on CUDA")]
NumPages = Annotated[
    int | None,
    typer.Option(
        help="Pages of the KV pool.",
        show_default="what every row could fill, on the CPU at most 1 GiB or one whole context, on CUDA what memory allows",
    ),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt plus output in tokens.", show_default="the model's, at most 32768")]
MaxPrefillTokens = Annotated[int | None, typer.Option(help="Prefill tokens in one step.", show_default="512 on the CPU, 8192 on CUDA")]
RunAhead = Annotated[
    int | None,
    typer.Option(help="Launches in flight beyond the one being read, 0 to 3.", show_default="0 on the CPU, 2 or 3 on CUDA"),
]
DecodeTables = Annotated[str | None, typer.Option(help="resident or rebuilt.", show_default=option_default("decode_tables"))]
SamplingSlots = Annotated[
    int | None,
    typer.Option(help="Rows that may use penalties, biases or forced ids at the same time.", show_default=option_default("sampling_slots")),
]
GpuMemoryFraction = Annotated[
    float | None,
    typer.Option(help="Share of a CUDA device's memory that may be used.", show_default=option_default("gpu_memory_fraction")),
]
HintShare = Annotated[
    float | None,
    typer.Option(
        help="Share of the KV pool that prefixes of episodes waiting for a tool may hold; 0 ignores their hints.",
        show_default=option_default("hint_share"),
    ),
]
ResultTransport = Annotated[
    str | None,
    typer.Option(
        help="How results leave a CUDA device: mapped (launches write host memory), copy, or auto: mapped if a probe agrees.",
        show_default=option_default("result_transport"),
    ),
]
WeightStaging = Annotated[
    str | None,
    typer.Option(
        help="Where an update's weights wait on a CUDA device: device, host (pinned memory), or auto: on the device if they fit.",
        show_default=option_default("weight_staging"),
    ),
]
CanaryTolerance = Annotated[
    float | None,
    typer.Option(
        help="Most that a canary's log-probability may be off the trainer's, in nats.", show_default="0.001 in float32, 0.2 in bfloat16"
    ),
]
CanaryMeanTolerance = Annotated[
    float | None,
    typer.Option(help="Most that canaries may be off on average, in nats.", show_default="0.001 in float32, 0.02 in bfloat16"),
]
Graphs = Annotated[bool | None, typer.Option("--graphs/--no-graphs", help="Capture decode steps on CUDA.", show_default="on")]
LoadFormat = Annotated[str | None, typer.Option(help="auto, or dummy for random weights.", show_default=option_default("load_format"))]
KeptIds = Annotated[bool | None, typer.Option("--kept-ids", help="Let requests ask for the ids that their filters kept.")]
TensorParallel = Annotated[
    int | None,
    typer.Option(help="Ranks that share the model, one process and one device each.", show_default=option_default("tp")),
]
RankTimeoutS = Annotated[
    float | None,
    typer.Option(
        help="How long a rank may show no sign of life before the engine is started anew.",
        show_default=option_default("rank_timeout_s"),
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed from which missing request seeds are drawn.", show_default="drawn")]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads of the engine.", show_default=f"half of the usable cores: {default_threads()} here")
]
WeightsDir = Annotated[
    str | None, typer.Option(help="Folder below which weight files are taken.", show_default="weights in the state folder")
]
KeepLast = Annotated[
    str | None,
    typer.Option(help="File that keeps the newest pushed weights, for a restart of the engine.", show_default="none is kept"),
]
StateDir = Annotated[str | None, typer.Option(help="State folder.", show_default="ARENO_STATE_DIR, else the user's")]
LeaseS = Annotated[float, typer.Option(help="How long a silent client keeps its requests, in seconds.")]
MaxRequests = Annotated[int, typer.Option(help="Most requests at the same time, waiting ones included.")]
MaxClientRequests = Annotated[int | None, typer.Option(help="Most requests of one client at the same time.", show_default="max_requests")]
HostTimeoutS = Annotated[
    float, typer.Option(help="How long an engine host that owes something may be silent before it is replaced, in seconds.")
]
DrainS = Annotated[float, typer.Option(help="How long requests may end after a first SIGTERM or Ctrl-C, in seconds.")]
MetricsPort = Annotated[int | None, typer.Option(help="Port on loopback for Prometheus; 0 takes a free one.", show_default="none")]
LogFormat = Annotated[str, typer.Option(help="text, or json for one object a line.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Take TCP connections from anybody and without encryption.")]
ServeJson = Annotated[bool, typer.Option("--json", help="Print one JSON line when ready and one when stopped or failed.")]
