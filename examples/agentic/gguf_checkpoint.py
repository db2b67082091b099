"""One GGUF file becomes one safetensors folder, through transformers, with nothing guessed on the way.

`read_gguf` refuses by name whatever the result could not express; `write_checkpoint` writes the folder. Called by `smollm2.py`,
which owns where files are found and where folders lie; torch loads only when a conversion begins. The invariant: a folder that was
written computes what the file says. Every tensor of the file is used and every tensor of the model is in the file, sizes come from the
file and not from a family's defaults, and query and key rows stand in transformers' order.

Llama files need that last one: their writers interleave the two halves of each head's rotary pairs, for queries and for keys, with
the head count of each. Qwen files keep transformers' order.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

SUPPORTED = ("llama", "qwen2", "qwen3")
INTERLEAVED = ("llama",)
PACKAGES = ("gguf", "accelerate")
CHECKPOINT_FILES = ("config.json", "generation_config.json", "model.safetensors")

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL_SIZES = (
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
)
_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# How byte-level vocabularies split text before merging. transformers knows the second group and would split the first one as GPT-2.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_KNOWN_SPLITS = ("gpt-2", "llama3", "llama-v3", "llama-bpe", "tekken", "qwen2", "deepseek-r1-qwen")


class ModelSourceError(Exception):
    """Base of what can go wrong with a model file; ``str(error)`` is "<what>; <limit or cause>; <remedy>"."""

    code = "model_source"

    def __init__(self, what: str, *, field: str | None = None, value: object = None, limit: str | None = None, remedy: str | None = None):
        self.what, self.field, self.value, self.limit, self.remedy = what, field, value, limit, remedy
        super().__init__("; ".join(part for part in (what, limit, remedy) if part))


class MissingPackage(ModelSourceError, ImportError):
    """A package that reading GGUF files needs is not installed."""

    code = "package_missing"


class MissingModel(ModelSourceError, FileNotFoundError):
    """There is no GGUF file where one was expected."""

    code = "model_missing"


class UnsupportedGguf(ModelSourceError, ValueError):
    """The file describes something that the written folder could not express."""

    code = "gguf_unsupported"


class BrokenGguf(ModelSourceError, ValueError):
    """The file is no GGUF file, or not all of one."""

    code = "gguf_broken"


class CacheBusy(ModelSourceError, TimeoutError):
    """Another process has been converting the same file for too long."""

    code = "cache_busy"


def check_packages() -> None:
    """Raises: MissingPackage naming what to install."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackage(
            f"the package{'s' if len(missing) > 1 else ''} {' and '.join(missing)} cannot be found",
            field="packages",
            value=missing,
            limit="transformers reads GGUF files with them",
            remedy="pip install 'areno-rollout[smollm2]', or pip install " + " ".join(missing),
        )


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened GGUF file: `fields` of its own architecture without the prefix, `tokenizer` fields likewise, `tensors` by name."""

    path: Path
    architecture: str
    fields: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    tensors: Mapping[str, Any]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape in torch's order; the file's is the reverse."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def values(self, name: str) -> np.ndarray:
        """Return a tensor's values as the file orders them, float32."""
        import gguf

        tensor = self.tensors[name]
        return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(self.shape(name))


def read_gguf(path: Path) -> GgufFile:
    """Open a file and refuse what cannot be converted. Raises: MissingPackage, MissingModel, BrokenGguf, UnsupportedGguf."""
    check_packages()
    if not path.is_file():
        raise MissingModel(f"{path} is no file", field="gguf", value=str(path), remedy="name a GGUF file with --gguf PATH")
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        contents = {name: field.contents() for name, field in reader.fields.items()}
        architecture = str(contents["general.architecture"])
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # the reader raises whatever the bytes lead it to
        raise BrokenGguf(
            f"{path} cannot be read as a GGUF file: {type(error).__name__}: {str(error)[:200]}",
            field="gguf",
            value=str(path),
            limit="it is another format or cut short",
            remedy="copy the file again",
        ) from error
    file = GgufFile(path, architecture, _under(contents, architecture), _under(contents, "tokenizer"), tensors)
    _check_supported(file)
    return file


def _under(contents: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name[len(prefix) + 1 :]: value for name, value in contents.items() if name.startswith(f"{prefix}.")}


def _check_supported(file: GgufFile) -> None:
    if file.architecture not in SUPPORTED:
        raise _unsupported(f"architecture {file.architecture!r}", f"supported: {', '.join(SUPPORTED)}", "architecture", file.architecture)
    for name in _SIZES:
        if name not in file.fields:
            raise _unsupported(f"a file without {file.architecture}.{name}", "the model's sizes come from the file", name, None)
    for name, value in file.fields.items():
        if name.startswith("rope.scaling") and value in ("none", 0, 0.0, False):
            continue
        if name not in _SIZES and name not in _OPTIONAL_SIZES:
            raise _unsupported(f"{file.architecture}.{name}={value!r:.60}", "the folder's config would not say it", name, value)
    split = file.tokenizer.get("ggml.pre", "gpt-2")
    if file.tokenizer.get("ggml.model") == "gpt2" and split not in _SINGLE_DIGITS + _KNOWN_SPLITS:
        known = ", ".join(_SINGLE_DIGITS + _KNOWN_SPLITS)
        raise _unsupported(f"the text splitting {split!r}", f"known: {known}", "tokenizer.ggml.pre", split)


def _unsupported(what: str, limit: str, field: str, value: object) -> UnsupportedGguf:
    return UnsupportedGguf(
        f"{what} cannot be converted", field=field, value=value, limit=limit, remedy="convert another file, or take the safetensors folder"
    )


def model_config(file: GgufFile) -> Any:
    """Return the file's transformers config. Raises: UnsupportedGguf."""
    from transformers import AutoConfig

    sizes = {theirs: _decimal(file.fields[ours]) for ours, theirs in _SIZES.items()}
    heads = sizes["num_attention_heads"]
    head_dim = file.fields.get("attention.key_length", sizes["hidden_size"] // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if file.fields.get(name, head_dim) != head_dim:
            raise _unsupported(f"{name}={file.fields[name]} beside heads of {head_dim}", "they must be equal", name, file.fields[name])
    return AutoConfig.for_model(
        file.architecture,
        **sizes,
        num_key_value_heads=file.fields.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": _decimal(file.fields.get("rope.freq_base", 10_000.0))},
        vocab_size=file.shape("token_embd.weight")[0] if "token_embd.weight" in file.tensors else 0,
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=file.tokenizer.get("ggml.bos_token_id"),
        eos_token_id=_end_ids(file),
        pad_token_id=file.tokenizer.get("ggml.padding_token_id"),
        architectures=[f"{'Llama' if file.architecture == 'llama' else file.architecture.title()}ForCausalLM"],
        dtype="float32",
    )


def _decimal(value: Any) -> Any:
    """Return a float32 of the file as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _end_ids(file: GgufFile) -> int | list[int] | None:
    ids = [file.tokenizer[name] for name in ("ggml.eos_token_id", "ggml.eot_token_id") if name in file.tokenizer]
    unique = list(dict.fromkeys(int(number) for number in ids))
    return unique[0] if len(unique) == 1 else unique or None


def load_tensors(file: GgufFile, config: Any) -> dict[str, torch.Tensor]:
    """Return the model's tensors by transformers' names, float32; a tied head is left out. Raises: UnsupportedGguf."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in empty.state_dict().items()}
    if config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    _check_tensors(file, wanted)
    model = AutoModelForCausalLM.from_pretrained(
        file.path.parent, gguf_file=file.path.name, config=config, dtype=torch.float32, local_files_only=True
    )
    loaded = model.state_dict()
    tensors = {name: loaded[name].detach().contiguous() for name in wanted}
    if file.architecture in INTERLEAVED:
        for name in wanted:
            if ".q_proj." in name or ".k_proj." in name:
                heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
                tensors[name] = torch.from_numpy(rotary_halves(file.values(gguf_name(name)), heads))
    for name, tensor in tensors.items():
        assert tensor.dtype is torch.float32 and tuple(tensor.shape) == wanted[name], f"{name} came as {tensor.dtype} {tuple(tensor.shape)}"
    return tensors


def rotary_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows with each head's interleaved rotary pairs put back as two halves. Shapes: [num_heads * head_dim, ...]."""
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def gguf_name(name: str) -> str:
    """Return the file's name of a transformers tensor."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        layer, _, part = module.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_TENSORS[part]}.{kind}"
    return f"{_TENSORS[module]}.{kind}"


def _check_tensors(file: GgufFile, wanted: Mapping[str, tuple[int, ...]]) -> None:
    names = {gguf_name(name): shape for name, shape in wanted.items()}
    for problem, found in (("lacks", names.keys() - file.tensors.keys()), ("has the unknown", file.tensors.keys() - names.keys())):
        if found:
            shown = ", ".join(sorted(found)[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
            raise _unsupported(f"a {file.architecture} file that {problem} {shown}", "every tensor counts", "tensors", sorted(found))
    for name, shape in names.items():
        if file.shape(name) != shape:
            raise _unsupported(f"{name} of shape {file.shape(name)}", f"the file's sizes make it {shape}", name, file.shape(name))


def write_checkpoint(file: GgufFile, folder: Path) -> None:
    """Write config, generation config, weights and, if the file has one, the tokenizer into an existing folder.

    Raises: UnsupportedGguf.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    config = model_config(file)
    tensors = load_tensors(file, config)
    if "ggml.tokens" in file.tokenizer:
        write_tokenizer(file, folder, max_length=config.max_position_embeddings)
    config.save_pretrained(folder)
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    GenerationConfig(**ends).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(file: GgufFile, folder: Path, *, max_length: int) -> None:
    """Write the file's tokenizer and chat template. Raises: UnsupportedGguf when an id would mean another token than in the file."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        file.path.parent, gguf_file=file.path.name, local_files_only=True, model_max_length=max_length
    )
    if file.tokenizer.get("ggml.model") == "gpt2" and file.tokenizer.get("ggml.pre") in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    tokens = file.tokenizer["ggml.tokens"]
    for number, (theirs, ours) in enumerate(zip(tokens, tokenizer.convert_ids_to_tokens(range(len(tokens))))):
        if theirs != ours:
            raise _unsupported(f"token {number}, {theirs!r} in the file and {ours!r} here,", "ids keep their meaning", "tokens", number)
    if len(tokenizer) != len(tokens):
        raise _unsupported(f"a vocabulary of {len(tokens)} that grew to {len(tokenizer)}", "ids keep their meaning", "tokens", len(tokens))
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name in ("gguf_file", "is_local", "local_files_only"):  # how it was read, which says nothing about it
        config.pop(name, None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
