"""Messages in, token ids out, exactly as the model's own template and tokenizer write them.

A `ChatFormat` is made from the service's tokenizer files, never from a name that could resolve to something else. It renders
through transformers' sandboxed template environment and encodes with the tokenizer's own rules; it loads no torch. Episodes
share one format; it is immutable. Invariants: rendering clean messages gives the ids of `apply_chat_template(tokenize=True)`,
a start token is never doubled, and untrusted text never becomes a control id.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollout.agent.call_forms import form_of_template
from rollout.agent.controls import Behind, ControlText, Placeholders
from rollout.agent.errors import ChatFormatError, TokenizerMismatch
from rollout.agent.families import Piece
from rollout.agent.provenance import StandIns, hide_joined, refuse_unless_same, untrusted_places
from rollout.agent.renderer import opens_thinking, prove_renderer, shows
from rollout.tokenizer_files import tokenizer_digest

Message = Mapping[str, Any]

# Of the files that a service sends, those that say how text becomes ids.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
HISTORIES = ("template", "append")
TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})


class TokenizerSource(Protocol):
    """Whoever hands out the tokenizer files of the served model."""

    async def tokenizer_files(self) -> dict[str, bytes]:
        """Return the files' contents by name."""
        ...


class ChatFormat:
    """One model's tokenizer and chat template.

    `template_kwargs` go to every rendering (for example `enable_thinking=False`). Text of the roles in `trusted_roles`, written
    by the program's author or sampled by the model, may hold control tokens; text of every other role may not.

    `history` says what becomes of earlier turns where the template would write them anew (drop their thinking, add empty think blocks):
    "template" follows it, in a new row; "append" leaves them as they were sampled, in one row. `renderer` is what is known of the
    template's family, None if it is of no known one.
    """

    __slots__ = (
        "_bos",
        "_controls",
        "_shown",
        "_stand_in",
        "_template_kwargs",
        "_tokenizer",
        "_wrapper",
        "call_form",
        "end_of_turn",
        "end_of_turn_id",
        "history",
        "renderer",
        "template",
        "tokenizer_digest",
        "trusted_roles",
    )

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        trusted_roles: Iterable[str] = TRUSTED_ROLES,
        history: str = "template",
    ):
        """Load the tokenizer and its template. Raises: ChatFormatError."""
        from tokenizers import Tokenizer

        if "tokenizer.json" not in files:
            raise ChatFormatError(
                "the tokenizer files lack tokenizer.json",
                field="files",
                value=sorted(files),
                limit="a fast tokenizer is needed",
                remedy="put tokenizer.json next to the model",
            )
        self.tokenizer_digest = str(tokenizer_digest(files))
        self._wrapper = _load_wrapper(files)
        self._tokenizer = Tokenizer.from_str(self._wrapper.backend_tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._controls = ControlText(self._tokenizer)
        self._stand_in = StandIns(self._controls.contents, keep_words=False).mark
        self._template_kwargs = dict(template_kwargs or {})
        self.trusted_roles = frozenset(trusted_roles)
        self.template: str | None = self._wrapper.chat_template if isinstance(self._wrapper.chat_template, str) else None
        self.call_form = form_of_template(self.template)
        bos = self._wrapper.bos_token_id
        added = self._tokenizer.encode("", add_special_tokens=True).ids
        self._bos: int | None = bos if bos is not None and added[:1] == [bos] else None
        self._shown: dict[tuple[str, bool], bool] = {}
        self.end_of_turn_id = self._find_end_of_turn()
        self.end_of_turn = None if self.end_of_turn_id is None else self.decode([self.end_of_turn_id])
        self.history = _checked_history(history)
        self.renderer = prove_renderer(self.render, self.template) if self.template is not None else None

    @classmethod
    def from_folder(cls, folder: str | Path, **options: Any) -> ChatFormat:
        """Load the format from a model folder on this machine. Raises: ChatFormatError."""
        paths = (Path(folder) / name for name in TOKENIZER_FILES)
        return cls({path.name: path.read_bytes() for path in paths if path.is_file()}, **options)

    @classmethod
    async def of(cls, client: TokenizerSource, **options: Any) -> ChatFormat:
        """Load the format that `client`'s service serves. Raises: ChatFormatError."""
        return cls(await client.tokenizer_files(), **options)

    def check_served(self, digest: str | None) -> None:
        """Refuse a service whose tokenizer has another digest; None: the service has none to compare. Raises: TokenizerMismatch."""
        if digest is not None and digest != self.tokenizer_digest:
            raise TokenizerMismatch(
                f"the chat format's tokenizer is {self.tokenizer_digest[:12]}",
                field="tokenizer_digest",
                value=self.tokenizer_digest,
                limit=f"the service serves {digest[:12]}",
                remedy="make the format with `await ChatFormat.of(client)`",
            )

    @property
    def opens_thinking(self) -> bool:
        """Return whether the template's generation prompt leaves a thinking block open, as far as its family is known."""
        return self.renderer is not None and opens_thinking(self.renderer.generation_prompt)

    @property
    def control_texts(self) -> Sequence[str]:
        """Return the texts of all control tokens, the longest first."""
        return self._controls.contents

    @property
    def control_ids(self) -> frozenset[int]:
        """Return the ids of all control tokens."""
        return self._controls.ids

    def without_renderer(self) -> ChatFormat:
        """Return this format as one whose family nobody knows: every turn renders the whole conversation and compares."""
        other = copy.copy(self)
        other.renderer = None
        return other

    def placeholders(self) -> Placeholders:
        """Return fresh placeholders for one conversation."""
        return Placeholders(self._controls)

    def prompt_ids(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> np.ndarray:
        """Return the ids of a rendered conversation, int32 [n]. Raises: ChatFormatError, UntrustedControlToken."""
        placeholders = self.placeholders()
        marked, marked_tools = self.mark(messages, placeholders), placeholders.mark(_clean(tools))
        text = self.render_marked(marked, placeholders, tools=marked_tools, add_generation_prompt=add_generation_prompt)
        return self.encode_rendered(text, placeholders)

    def rendered_ids(self, text: str) -> np.ndarray:
        """Return the ids of text that a template already rendered: control tokens count, nothing is added, int32 [n]."""
        return np.array(self._controls.encode_trusted(_clean(text)), np.int32)

    def text_ids(self, text: str) -> np.ndarray:
        """Return the ids of plain text: control tokens stay text; a start token comes first if the tokenizer adds one."""
        start = [] if self._bos is None else [self._bos]
        return np.array(start + self._controls.encode_plain(_clean(text), behind="nothing"), np.int32)

    def fragment_ids(self, text: str) -> np.ndarray:
        """Return the ids of a piece of text inside a row, in which nothing is a control token, int32 [n]."""
        return np.array(self._controls.encode_plain(text, behind="text") if text else [], np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids, control tokens included. For people and parsers: never encode the result."""
        return self._tokenizer.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=False)

    def mark(self, messages: Sequence[Message], placeholders: Placeholders, *, after_turn: bool = False) -> list[dict[str, Any]]:
        """Return copies of messages in which untrusted text hides its control tokens behind placeholders. Raises: ChatFormatError."""
        self._refuse_hidden(messages, after_turn=after_turn)
        return [self._marked(message, placeholders) for message in messages]

    def _refuse_hidden(self, messages: Sequence[Message], *, after_turn: bool) -> None:
        """Refuse messages that the template would leave out: the model would not see what its trainer believes it was told."""
        if self._wrapper.chat_template is None:
            return
        for role in (message.get("role") for message in messages if _says_something(message)):
            if not isinstance(role, str):
                continue  # the template says what it makes of that
            if (role, after_turn) not in self._shown:
                self._shown[role, after_turn] = shows(self.render, role, after_turn=after_turn)
            if not self._shown[role, after_turn]:
                raise ChatFormatError(
                    f"the chat template leaves out messages of role {role!r}{' after a turn' if after_turn else ''}",
                    field="messages",
                    value=role,
                    limit="the model sees every message that it is given",
                    remedy="say it in a role that the template writes (a tool's result as a user message), or use another template",
                )

    def _marked(self, message: Message, placeholders: Placeholders) -> dict[str, Any]:
        clean = _clean(message)
        return clean if self.trusts(clean) else placeholders.mark(clean)

    def trusts(self, message: Message) -> bool:
        """Return whether a message's text may hold control tokens."""
        role = message.get("role")
        return isinstance(role, str) and role in self.trusted_roles

    def render(self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = True) -> str:
        """Return a conversation as the template writes it. Raises: ChatFormatError."""
        if self._wrapper.chat_template is None:
            raise ChatFormatError(
                "the model has no chat template",
                field="chat_template",
                limit="messages need one",
                remedy="add chat_template.jinja to the model's folder, or start the episode from ids or text",
            )
        try:
            return self._wrapper.apply_chat_template(
                list(messages), tools=tools or None, tokenize=False, add_generation_prompt=add_generation_prompt, **self._template_kwargs
            )
        except Exception as error:  # a template is foreign code: it may raise anything
            roles = [message.get("role") if isinstance(message, Mapping) else type(message).__name__ for message in messages]
            raise ChatFormatError(
                f"the chat template refused a conversation of roles {roles[-8:]}: {type(error).__name__}: {str(error)[:300]}",
                field="messages",
                value=roles,
                remedy="use roles and an order that this model's template knows",
            ) from error

    def render_marked(
        self, messages: Sequence[Message], placeholders: Placeholders, *, tools: Any = None, add_generation_prompt: bool = True
    ) -> str:
        """Return marked messages as the template writes them, with control texts hidden that untrusted strings spell together.

        Raises: ChatFormatError, UntrustedControlToken.
        """
        text = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        renderings: list[str] = []
        for keep_words in (False, True):
            stand_ins = StandIns(self._controls.contents, keep_words=keep_words)
            copies = [message if self.trusts(message) else stand_ins.of(message) for message in messages]
            try:
                marked = self.render(copies, tools=stand_ins.of(tools), add_generation_prompt=add_generation_prompt)
            except ChatFormatError:
                continue  # the template takes the messages only as they are
            untrusted = untrusted_places(text, marked, stand_ins.mark)
            if untrusted is not None:
                return hide_joined(text, marked, untrusted, self._controls, placeholders)
            renderings.append(marked)
        refuse_unless_same(text, renderings, self._controls)
        return text

    def join_pieces(self, pieces: Sequence[Piece], placeholders: Placeholders) -> str:
        """Return pieces of the template's own words and of untrusted text as one, with the control texts hidden that they spell together.

        Raises: UntrustedControlToken.
        """
        text = "".join(piece for piece, _ in pieces)
        marked = "".join(self._stand_in * len(piece) if untrusted else piece for piece, untrusted in pieces)
        untrusted = np.repeat(np.array([untrusted for _, untrusted in pieces], np.bool_), [len(piece) for piece, _ in pieces])
        return hide_joined(text, marked, untrusted, self._controls, placeholders)

    def encode_rendered(self, text: str, placeholders: Placeholders, *, behind: Behind = "nothing") -> np.ndarray:
        """Return the ids of text rendered from marked messages that stands behind what is named, int32 [n].

        Raises: UntrustedControlToken.
        """
        return np.array(self._controls.encode_rendered(text, placeholders, behind=behind), np.int32)

    def _find_end_of_turn(self) -> int | None:
        """Return the control id that the template writes right after a reply, None if it writes none."""
        if self._wrapper.chat_template is None:
            return None
        reply = self.placeholders().reply(0)
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}, {"role": "user", "content": "b"}]
        try:
            _, found, after = self.render(talk).partition(reply)
        except ChatFormatError:
            return None
        first = self._controls.encode_trusted(after)[:1] if found else []
        return first[0] if first and first[0] in self._controls.ids else None


def _checked_history(history: str) -> str:
    if history not in HISTORIES:
        raise ChatFormatError(
            f"history={history!r}",
            field="history",
            value=history,
            limit=f"one of {', '.join(HISTORIES)}",
            remedy='leave it out to follow the template, or pass history="append" to keep every turn as it was sampled',
        )
    return history


def _says_something(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return bool(content.strip()) if isinstance(content, str) else content is not None


def _clean(value: Any) -> Any:
    """Return `value` with lone surrogates replaced: they have no UTF-8 form, and no tokenizer takes them."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    return value


def _load_wrapper(files: Mapping[str, bytes]) -> Any:
    """Return transformers' tokenizer over the files; the class named in them is data here, never code to run."""
    from transformers import PreTrainedTokenizerFast

    try:
        with tempfile.TemporaryDirectory(prefix="chat-format-") as folder:
            for name in TOKENIZER_FILES:
                if name in files:
                    (Path(folder) / name).write_bytes(_without_class(files[name]) if name == "tokenizer_config.json" else files[name])
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the loaders raise whatever their parsers raise
        raise ChatFormatError(
            f"the tokenizer files cannot be loaded: {type(error).__name__}: {str(error)[:300]}",
            field="files",
            value=sorted(files),
            remedy="check tokenizer.json and tokenizer_config.json of the served model",
        ) from error


def _without_class(config: bytes) -> bytes:
    loaded = json.loads(config)
    return json.dumps({key: value for key, value in loaded.items() if key not in {"tokenizer_class", "auto_map"}}).encode()
