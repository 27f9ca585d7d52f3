"""Loading models and tokenizers: built-in models, names on a hub, local folders and GGUF files."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcli.errors import ModelError, UsageError
from kvcli.models.builtin_models import BUILTIN_MODELS, DEFAULT_MODEL, copy_folder, fetch_builtin
from kvcli.models.checkpoint import AUTO, load_checkpoint, load_gguf, read_config, read_gguf, read_gguf_config
from kvcli.models.fingerprint import fingerprint
from kvcli.models.hub import check_model_name, download_config, download_model, is_folder, local_folder
from kvcli.progress import Progress, Say, no_progress, say_nothing
from kvcli.seam.decoder import decoder_layers, position_table
from kvcli.seam.probe import probe
from kvcli.spec import ModelSpec


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, a tokenizer with a padding token, and a fingerprint that artifacts name."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec
    fingerprint: str

    @property
    def end_tokens(self) -> list[int]:
        """Tokens that end a text: those of the configs, the tokenizer's, and that of a reply in its chat template."""
        own: Any = getattr(self.tokenizer, "eos_token_id", None)
        return sorted({*end_tokens(self.model), own, *_end_of_reply(self.tokenizer)} - {None})

    def identity(self) -> dict[str, Any]:
        """`model`, `fingerprint` and `spec`, which identify the model in manifests, as plain JSON values."""
        return {"model": self.name, "fingerprint": self.fingerprint, "spec": self.spec.to_dict()}

    def check_length(self, length: int, warn: Say) -> None:
        """Warns of more tokens than the model was trained on; UsageError: it has no positions for them."""
        if length > (limit := self.spec.max_position_embeddings):
            if position_table(self.model) is not None:
                raise UsageError(f"{self.name} has positions for {limit} tokens, not for {length}")
            warn(f"warning: {length} tokens are more than the {limit} that {self.name} was trained on")


def load_model(
    name: str = DEFAULT_MODEL,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    base_config: str | None = None,
    revision: str | None = None,
    say: Say = say_nothing,
    progress: Progress = no_progress,
) -> LoadedModel:
    """Loads a model by built-in name, hub name, local folder or GGUF file.

    No code of a model's repository is run, and standard input is not read. Every weight must be in the checkpoint, and
    finite.

    Args:
        name: `smollm2-135m`, `qwen2.5-coder-1.5b` (which downloads 1.1 GB), `org/model`, a folder, or a path that
            ends in .gguf.
        device: default CUDA when there is one, else CPU. `auto`: layers are spread over all GPUs, as transformers'
            `device_map="auto"` does; with one GPU or none, as by default.
        dtype: default bfloat16 on CUDA, float32 on CPU.
        base_config: for GGUF files, a hub name or folder whose config (RoPE scaling above all) is used.
        revision: branch, tag or commit of a model on the hub.

    Raises:
        ModelError: the model cannot be found, downloaded or read, or its weights are incomplete or not finite.
        UnsupportedModelError: an architecture kvcli does not compress.
        UsageError: a device that holds no data, a GGUF file for several GPUs, or a revision where there is none.
    """
    spread = device == AUTO and torch.cuda.device_count() > 1
    default = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(default if device in (None, AUTO) else device)
    if chosen.type == "meta":
        raise UsageError("device 'meta' holds no data; choose another, such as cpu or cuda")
    dtype = dtype or (torch.bfloat16 if chosen.type == "cuda" else torch.float32)
    path = Path(name).expanduser()
    if revision is not None and (name in BUILTIN_MODELS or name.endswith(".gguf") or is_folder(path)):
        raise UsageError(f"'{name}' is no model on the hub, so it has no revision '{revision}'")
    if name.endswith(".gguf"):
        if spread:
            raise UsageError("a GGUF file is not spread over several GPUs; name one, such as --device cuda:0")
        check_model_name(name)
        model, tokenizer = _load_gguf(path, dtype, base_config, progress)
    else:
        if name in BUILTIN_MODELS:
            folder = fetch_builtin(BUILTIN_MODELS[name], say, progress)
        else:
            folder = local_folder(name) or download_model(name, revision, say, read_config)
        model, tokenizer = load_checkpoint(folder, dtype, AUTO if spread else chosen)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if spread:
        _check_in_memory(model)
    else:
        model.to(chosen)
    model.eval()
    check_finite(model)
    end_tokens(model)
    spec = probe(model).spec
    return LoadedModel(name, model, tokenizer, spec, fingerprint(model, spec))


def end_tokens(model: Any) -> list[int]:
    """Tokens that end a text by the generation config or the model's config; ModelError: they are no tokens."""
    ends = [getattr(x, "eos_token_id", None) for x in (model.generation_config, model.config.get_text_config())]
    each = [x for x in chain.from_iterable(end if isinstance(end, list) else [end] for end in ends) if x is not None]
    if other := [x for x in each if not isinstance(x, int)]:
        raise ModelError(f"eos_token_id of the model's configs is token ids, not {other[0]!r}")
    return list(dict.fromkeys(each))


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
    """Messages as the chat template renders them; a template that passes over texts, as of models that see, gets parts.

    `options` are those of `apply_chat_template`; a template that fails raises errors of many kinds.
    """
    text = str(tokenizer.apply_chat_template([*messages], tokenize=False, **options))
    said = [str(message["content"]).strip() for message in messages if message.get("role") == "user"]
    if not all(x in text for x in said):
        parts = [{**x, "content": [{"type": "text", "text": x.get("content") or ""}]} for x in messages]
        with suppress(Exception):  # one that takes texts alone changes them
            of_parts = str(tokenizer.apply_chat_template(parts, tokenize=False, **options))
            return of_parts if all(x in of_parts for x in said) else text
    return text


def _end_of_reply(tokenizer: Any) -> list[int]:
    """The special token that follows a reply in a chat template; none where there is no such token or template."""
    turns = [{"role": role, "content": "Hello"} for role in ("user", "assistant")]
    try:
        text = rendered(tokenizer, turns)
        after = tokenizer(text.rpartition("Hello")[2].strip(), add_special_tokens=False)["input_ids"]
        return [x for x in after[:1] if tokenizer.added_tokens_decoder[x].special]
    except Exception:  # no template, one that wants other messages, or a token that is text
        return []


def find_config(name: str, *, base_config: str | None = None, revision: str | None = None) -> Any:
    """The transformers config of a model that `load_model` would load; no weights are downloaded or read.

    Arguments and errors are those of `load_model`; a built-in model must have been fetched.
    """
    check_model_name(name)
    if name in BUILTIN_MODELS:
        return read_config(copy_folder(BUILTIN_MODELS[name]))
    if not name.endswith(".gguf"):
        return _config_of(name, revision)
    return read_gguf_config(Path(name).expanduser()) if base_config is None else _config_of(base_config)


def _config_of(name: str, revision: str | None = None) -> Any:
    return read_config(local_folder(name) or download_config(name, revision))


def _check_in_memory(model: torch.nn.Module) -> None:
    """Raises ModelError if accelerate keeps parts of a model on the CPU or on disk, because the GPUs are too small."""
    if away := [name for name, weight in model.named_parameters() if weight.device.type in ("meta", "cpu")]:
        raise ModelError(
            f"the model does not fit into the memory of {torch.cuda.device_count()} GPUs ({away[0]} would be on the "
            "CPU or on disk); choose a smaller --dtype or a quantized copy"
        )


def check_finite(model: torch.nn.Module) -> None:
    """Refuses a model with NaN or infinite weights; reads every weight once and keeps no copy.

    Weights on `meta` and in quantized formats are not looked at. ModelError: names the first such weight and its layer.
    """
    weights = {
        name: torch.stack(torch.aminmax(weight.detach()))
        for name, weight in model.named_parameters()
        if type(weight.data) is Tensor and weight.is_floating_point() and weight.itemsize > 1
        if weight.numel() and not weight.is_meta
    }
    finite = {name: extremes.isfinite().all() for name, extremes in weights.items()}
    if bad := [name for name, is_finite in finite.items() if not is_finite]:
        layer = re.search(r"\.layers\.(\d+)\.", f".{bad[0]}")
        where = f"layer {layer[1]}, {bad[0]}" if layer else bad[0]
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ModelError(f"the model's weights are not finite: {where}{more}; use another copy or dtype of the model")


@contextmanager
def layers_watched(model: Any, watch: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Inside the block, `watch` gets the index and the output [batch, time, hidden_size] of each layer that ran."""

    def ran(layer_idx: int, layer: Any, inputs: Any, output: Any) -> None:
        watch(layer_idx, output if isinstance(output, Tensor) else output[0])

    hooks = [x.register_forward_hook(partial(ran, i)) for i, x in enumerate(decoder_layers(model))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def not_finite(model: Any, using: str, again: Callable[[], object]) -> ModelError:
    """The error that names the first layer of a model whose output is not finite.

    `using` names what attention is computed with; `again` repeats the forward pass, whose layers are watched.
    """
    bad: list[int] = []

    def watch(layer_idx: int, output: Tensor) -> None:
        if not output.isfinite().all():
            bad.append(layer_idx)

    with torch.inference_mode(), layers_watched(model, watch):
        again()
    where = f"from layer {bad[0]} on" if bad else "in the logits, after the last layer or after the prompt"
    return ModelError(f"with {using}, the model's values are not finite {where}; try another dtype, such as float32")


def _load_gguf(
    path: Path, dtype: torch.dtype, base_config: str | None, progress: Progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a GGUF file, unless that would lose the RoPE scaling, a window or layers."""
    config = None if base_config is None else _config_of(base_config)
    try:
        reader = read_gguf(path)
        tensors = [tensor.name for tensor in reader.tensors]
        lost = _lost(reader, tensors, read_gguf_config(path)) if config is None else None
    except ModelError:
        raise
    except Exception as error:  # the reader checks little: a damaged file ends in any error
        raise ModelError(f"{path} is not a readable GGUF file: {error}; copy or download it again") from error
    if lost is not None:
        raise ModelError(f"{path.name} {lost}; name the original model's config with --base-config")
    layers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if config is not None and len(layers) != config.num_hidden_layers:  # more layers would be dropped on loading
        raise ModelError(f"{path.name} has {len(layers)} layers, but {base_config} has {config.num_hidden_layers}")
    return load_gguf(path, dtype, config, progress)


_DROPPED = "which would be dropped on loading"


def _lost(reader: Any, tensors: Sequence[str], config: Any) -> str | None:
    """What a GGUF file says of attention and transformers does not read, or what it does not say; None: nothing."""

    def said(name: str, default: Any = None) -> Any:
        return next((x.contents() for key, x in reader.fields.items() if key.endswith(f".{name}")), default)

    if found := [name for name in tensors if name.startswith(("rope_freqs", "rope_factors"))]:
        return f"keeps its RoPE scaling in a {found[0].partition('.')[0]} tensor, {_DROPPED}"
    factor = said("rope.scaling.factor", said("rope.scale_linear", 1)) if said("rope.scaling.type") != "none" else 1
    if factor not in (0, 1) and ModelSpec.from_config(config).rope.rope_type == "default":
        return f"has RoPE scaling by {factor:g}, {_DROPPED}"
    window = said("attention.sliding_window") or getattr(config, "sliding_window", None)
    if window != getattr(config, "sliding_window", None) and window < config.max_position_embeddings:
        return f"has windows of {window} tokens, {_DROPPED}"
    width = getattr(config, "head_dim", None)
    if getattr(config, "query_pre_attn_scalar", width) != width:  # Gemma 2 and 3 of 27B
        return f"does not say how scores of heads of {width} channels are scaled (query_pre_attn_scalar)"
    return None
