"""The peer of the `wire` benchmark: an HTTP server that streams tokens as server-sent events in OpenAI's shape.

uvicorn and starlette as most inference servers use them. It makes tokens up itself, so no engine process stands behind it; ids and
log-probabilities are lists before the stream begins, which favours it. One event has `tokens_per_flush` tokens with their ids
and both log-probabilities.

    python -m tests.bench.sse_server --port 8000 --tokens-per-flush 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.fakes import fake_ids, fake_logprobs


async def events(seed: int, tokens: int, tokens_per_flush: int) -> AsyncIterator[str]:
    """Yield a stream's events, letting the other streams go on after each."""
    ids = fake_ids(seed, tokens)
    logprobs = fake_logprobs(ids, 0).tolist()
    raw, names = [value - 0.5 for value in logprobs], [f"token_id:{one}" for one in ids.tolist()]
    for start in range(0, tokens, tokens_per_flush):
        part = slice(start, start + tokens_per_flush)
        choice = {
            "index": 0,
            "text": "",
            "logprobs": {"tokens": names[part], "token_logprobs": logprobs[part], "raw_logprobs": raw[part]},
            "finish_reason": "length" if part.stop >= tokens else None,
        }
        body = {"id": f"cmpl-{seed}", "object": "text_completion", "created": 0, "model": "scripted", "choices": [choice]}
        yield f"data: {json.dumps(body)}\n\n"
        await asyncio.sleep(0)
    yield "data: [DONE]\n\n"


def application(tokens_per_flush: int) -> Starlette:
    """Return the server's application: GET /v1/completions?seed=&tokens=."""

    async def completions(request: Request) -> StreamingResponse:
        seed, tokens = int(request.query_params["seed"]), int(request.query_params["tokens"])
        return StreamingResponse(events(seed, tokens, tokens_per_flush), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", completions)])


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens-per-flush", type=int, default=1)
    given = parser.parse_args()
    uvicorn.run(application(given.tokens_per_flush), host="127.0.0.1", port=given.port, log_level="warning", backlog=1024)


if __name__ == "__main__":
    main()
