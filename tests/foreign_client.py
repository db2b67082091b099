"""A client written from rollout/README.md alone: zmq, msgpack, struct, a JSON key file, and nothing of ours.

It proves that the protocol section says enough for a client in another language. Arrays are lists of numbers here.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import zmq

HEADER = struct.Struct("<HH16s")
VERSION = 1
HELLO, WELCOME, HEARTBEAT, ALIVE, GOODBYE, ERROR, DONE = 1, 2, 3, 4, 5, 6, 7
GENERATE, ATTACH, CANCEL, CANCEL_RESULT, DELTAS, ACK, SCORE, SCORED, INFO, INFO_RESULT = 16, 17, 18, 19, 20, 21, 22, 23, 32, 33
PAUSE, RESUME, GENERATE_GROUP, TOKENIZER_FILES, TOKENIZER_FILES_RESULT = 48, 49, 24, 36, 37
WEIGHTS_BEGIN, WEIGHTS_TICKET, WEIGHTS_STAGE_BUCKET, WEIGHTS_COMMIT, WEIGHTS_REPORT = 50, 51, 57, 53, 54
ZEROS = bytes(16)
FORMATS = {"|u1": "B", "<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d"}

Arrays = dict[str, tuple[str, list[int], list[Any]]]


@dataclass
class Message:
    op: int
    request_id: bytes
    fields: dict[str, Any]
    arrays: Arrays

    def numbers(self, name: str) -> list[Any]:
        return self.arrays[name][2] if name in self.arrays else []

    def request_ids(self) -> list[bytes]:
        raw = bytes(self.numbers("request_ids"))
        return [raw[at : at + 16] for at in range(0, len(raw), 16)]


@dataclass
class Stream:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ending: dict[str, Any] | None = None
    repeated: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)
    text: str | None = None


def rows_of_ids(request_ids: list[bytes]) -> tuple[str, list[int], list[int]]:
    return "|u1", [len(request_ids), 16], list(b"".join(request_ids))


class ForeignClient:
    """See the module. `key_file` is what `keys new` made; without one the connection is in clear."""

    def __init__(self, address: str, key_file: str | None = None) -> None:
        self.address, self.context = address, zmq.Context()
        self.key = json.loads(Path(key_file).read_text()) if key_file else None
        self.streams: dict[bytes, Stream] = {}
        self.session: dict[str, Any] = {}
        self.errors: list[Message] = []
        self.connect()

    def socket(self, address: str) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 500
        if self.key:
            socket.curve_serverkey = self.key["server"].encode()
            socket.curve_publickey = self.key["public"].encode()
            socket.curve_secretkey = self.key["secret"].encode()
        socket.connect(address)
        return socket

    def connect(self) -> None:
        self.data = self.socket(self.address)
        fields = {"name": "foreign", **{name: self.session[name] for name in ("session", "secret") if self.session}}
        self.session = self.call(self.data, HELLO, fields, want=WELCOME).fields
        self.control = self.socket(self.session["control_address"])
        self.call(self.control, HELLO, {name: self.session[name] for name in ("session", "secret")}, want=WELCOME)

    def lose_connection(self) -> None:
        """Drop both sockets without a word, as a cut network does."""
        for socket in (self.data, self.control):
            socket.close(linger=0)

    def send(self, socket: Any, op: int, fields: dict[str, Any], arrays: Arrays | None = None, request_id: bytes | None = None) -> bytes:
        request_id = os.urandom(16) if request_id is None else request_id
        arrays = arrays or {}
        body = msgpack.packb([fields, [[name, dtype, shape] for name, (dtype, shape, _) in arrays.items()]])
        frames = [struct.pack(f"<{len(numbers)}{FORMATS[dtype]}", *numbers) for dtype, _, numbers in arrays.values()]
        socket.send_multipart([HEADER.pack(VERSION, op, request_id), body, *frames])
        return request_id

    def receive(self, socket: Any, timeout_s: float) -> Message | None:
        if not socket.poll(max(0, timeout_s * 1000)):
            return None
        header, body, *frames = socket.recv_multipart()
        version, op, request_id = HEADER.unpack(header)
        assert version == VERSION
        fields, descriptors = msgpack.unpackb(body)
        arrays: Arrays = {}
        for (name, dtype, shape), frame in zip(descriptors, frames, strict=True):
            arrays[name] = dtype, shape, list(struct.unpack(f"<{math.prod(shape)}{FORMATS[dtype]}", frame))
        return Message(op, request_id, fields, arrays)

    def call(self, socket: Any, op: int, fields: dict[str, Any], arrays: Arrays | None = None, *, want: int) -> Message:
        """Send a call and return its answer; what else comes in between is taken."""
        request_id = self.send(socket, op, fields, arrays)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            message = self.receive(socket, deadline - time.monotonic())
            if message is not None and message.request_id == request_id and message.op in (want, ERROR):
                assert message.op == want, message.fields
                return message
            if message is not None:
                self.take(message)
        raise TimeoutError(f"operation {op} got no answer")

    def generate(self, prompt: list[int], **fields: Any) -> bytes:
        request_id = self.send(self.data, GENERATE, fields, {"prompt_ids": ("<i4", [len(prompt)], prompt)})
        self.streams[request_id] = Stream()
        return request_id

    def generate_group(self, prompt: list[int], members: list[bytes], **fields: Any) -> bytes:
        arrays: Arrays = {"prompt_ids": ("<i8", [len(prompt)], prompt), "member_ids": rows_of_ids(members)}
        self.streams |= {member: Stream() for member in members}
        return self.send(self.data, GENERATE_GROUP, fields, arrays)

    def take(self, message: Message) -> None:
        if message.op == DELTAS:
            self.take_flush(message)
        elif message.op == ALIVE:
            # Endings that this client has not acknowledged: those that it wants once more, and those that it does not.
            self.attach([one for one in message.request_ids() if one in self.streams and self.streams[one].ending is None])
        elif message.op == ERROR:
            self.errors.append(message)

    def take_flush(self, message: Message) -> None:
        endings = {ending["index"]: ending for ending in message.fields["finished"]}
        counts = message.numbers("version_counts")
        versions = [value for value, count in zip(message.numbers("version_values"), counts, strict=True) for _ in range(count)]
        ids, logprobs = message.numbers("token_ids"), message.numbers("logprobs")
        texts, scores = self.texts_of(message), self.scores_of(message)
        at, ended, gaps = 0, [], []
        rows = zip(message.request_ids(), message.numbers("offsets"), message.numbers("counts"), strict=True)
        for index, (request_id, offset, count) in enumerate(rows):
            piece, at = slice(at, at + count), at + count
            stream = self.streams.get(request_id)
            if stream is None:
                ended += [request_id] if index in endings else []
                continue
            have = len(stream.ids)
            if offset > have:
                gaps.append(request_id)
                continue
            stream.repeated += min(have - offset, count)
            for column, new in ((stream.ids, ids), (stream.logprobs, logprobs), (stream.versions, versions)):
                column.extend(new[piece][have - offset :])
            stream.prompt_logprobs = scores.get(index, stream.prompt_logprobs)
            ending = endings.get(index, {})
            if ending.get("output_tokens") == len(stream.ids) and (stream.prompt_logprobs or not ending["prompt_scored"]):
                stream.ending, stream.text = ending, texts[index]
                ended.append(request_id)
        self.send(self.data, ACK, {"seq": message.fields["seq"]}, {"request_ids": rows_of_ids(ended)} if ended else None, ZEROS)
        self.attach(gaps)

    @staticmethod
    def texts_of(message: Message) -> dict[int, str | None]:
        """Return the text of each ending, None for a request without stop strings, by the stream's index."""
        texts, raw, at = {}, bytes(message.numbers("texts")), 0
        for ending in message.fields["finished"]:
            size = ending["text_bytes"]
            texts[ending["index"]] = None if size is None else raw[at : at + size].decode()
            at += size or 0
        return texts

    @staticmethod
    def scores_of(message: Message) -> dict[int, list[float]]:
        """Return the log-probabilities of scored prompts by the stream's index."""
        scores, table, at = {}, message.numbers("prompt_scores"), 0
        for index, _start, count, _version in zip(*[iter(table)] * 4, strict=True):
            scores[index], at = message.numbers("prompt_logprobs")[at : at + count], at + count
        return scores

    def attach(self, request_ids: list[bytes]) -> None:
        if request_ids:
            offsets = [len(self.streams[one].ids) for one in request_ids]
            self.send(self.data, ATTACH, {}, {"request_ids": rows_of_ids(request_ids), "offsets": ("<i8", [len(offsets)], offsets)})

    def read(self, until: Any, timeout_s: float = 20.0) -> None:
        """Take messages until a condition holds, with a heartbeat each second."""
        deadline, beat = time.monotonic() + timeout_s, 0.0
        while not until():
            assert time.monotonic() < deadline, "it never came"
            if time.monotonic() > beat:
                beat = time.monotonic() + 1.0
                self.send(self.data, HEARTBEAT, {})
            message = self.receive(self.data, 0.2)
            if message is not None:
                self.take(message)

    def close(self) -> None:
        self.send(self.data, GOODBYE, {}, request_id=ZEROS)
        self.data.close()
        self.control.close()
        self.context.term()
