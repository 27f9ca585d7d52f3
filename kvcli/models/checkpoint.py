"""Reads a model folder or a GGUF file; what is damaged, incomplete or needs code is refused in one line.

Only data is read: JSON, safetensors, GGUF, and pickled weights as far as torch reads them with `weights_only`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging

from kvcli.errors import KvcliError, ModelError, UnsupportedModelError, error_text
from kvcli.progress import Progress, no_progress
from kvcli.spec import ModelSpec

AUTO = "auto"
"""The device that means all GPUs."""

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_FLOATS = ("F64", "F32", "F16", "BF16", torch.float64, torch.float32, torch.float16, torch.bfloat16)
_SHOWN_NAMES = 3
_AGAIN = "copy or download it again"
_COPY_TOKENIZER = "copy the tokenizer's files from the original model"
_LOCAL = {"trust_remote_code": False, "local_files_only": True}
"""Arguments of every `from_pretrained`: no code of a model's folder runs, nothing is asked and nothing is fetched."""


def load_checkpoint(
    folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Reads a model and its tokenizer from a folder of safetensors or pickled weights.

    Quantized weights are read onto the device where the model will run, because libraries choose kernels by it, others
    onto the CPU; the device `auto` spreads them, as `device_map="auto"` of transformers does.

    ModelError: a file is missing or damaged, or weights and config do not belong together; the message names them;
    UnsupportedModelError: an architecture that kvcli does not compress, or that needs code of its repository.
    """
    config = read_config(folder)
    _check_weight_files(folder, quantized=bool(getattr(config, "quantization_config", None)))
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise _cannot_load(folder, f"it has no tokenizer.json; {_COPY_TOKENIZER}")
    device_map: str | dict[str, str] | None = None
    if device == AUTO:
        device_map = AUTO
    elif getattr(config, "quantization_config", None):
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        device_map = {"": str(device)}
    return _load(folder, folder, dtype, config, device_map=device_map)


def load_gguf(
    path: Path, dtype: torch.dtype, config: Any = None, progress: Progress = no_progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Reads a model and its tokenizer from a GGUF file.

    The weights are dequantized to `dtype`; a transformers `config` is used in place of the file's.

    ModelError: the file is damaged, or its weights and the config do not belong together; UnsupportedModelError: an
    architecture that kvcli does not compress.
    """
    with _reading_gguf(f"read {path.name}", progress):
        return _load(path, path.parent, dtype, config, gguf_file=path.name)


def read_config(folder: Path) -> Any:
    """The transformers config of a folder; no weights are read.

    ModelError: no config, or one that cannot be used; UnsupportedModelError: an architecture that kvcli does not
    compress, or that needs code of its repository.
    """
    path = folder / "config.json"
    if (folder / "adapter_config.json").is_file():
        raise _cannot_load(folder, "it holds an adapter; merge it into its base model first (PEFT: merge_and_unload)")
    if not path.is_file():
        raise _cannot_load(folder, "it has no config.json, so it is not a folder of a model")
    values = _read_json(folder, path.name)
    family = values.get("model_type")
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        code = "; it needs Python code of its repository, which kvcli never runs" if "auto_map" in values else ""
        raise UnsupportedModelError(
            f"model type '{family}' is no causal language model of transformers {transformers.__version__}{code}"
        )
    with _explained(folder, "its config.json cannot be used"):
        config = AutoConfig.from_pretrained(folder, **_LOCAL)
        if (how := getattr(config, "quantization_config", None)) and not AutoHfQuantizer.supports_quant_method(how):
            raise ValueError(f"transformers knows no quantization '{how['quant_method']}'")
    config._attn_implementation = attention_implementation(config)  # a config may name kernels to be downloaded and run
    ModelSpec.from_config(config)
    return config


def read_gguf_config(path: Path) -> Any:
    """The transformers config of a GGUF file; of its tensors, only names and shapes are read.

    ModelError: a damaged file; UnsupportedModelError: an architecture that kvcli does not compress.
    """
    with _explained(path, "its config cannot be read"), _reading_gguf(path.name, no_progress):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, **_LOCAL)
    ModelSpec.from_config(config)
    return config


def read_gguf(path: str | Path) -> Any:
    """A reader of a GGUF file and of the parts beside it; ModelError: not the first part, or not all of one file."""
    from gguf.gguf_reader import GGUFReader

    path, reader = Path(path), GGUFReader(path)
    count, tensors = (
        int(x.contents()) if (x := reader.fields.get(f"split.{name}")) else 0 for name in ("count", "tensors.count")
    )
    names = [re.sub(r"\d{5}-of-\d{5}$", f"{i + 1:05d}-of-{count:05d}", path.stem) + ".gguf" for i in range(count)]
    if count > 1:
        if path.name != names[0] or not all(path.with_name(name).is_file() for name in names):
            what = f"name the first, {names[0]}, with all others beside it"
            raise ModelError(f"{path} is one of {count} parts: {what}, or merge them (llama-gguf-split --merge)")
        reader.tensors += [x for name in names[1:] for x in GGUFReader(path.with_name(name)).tensors]
        if (found := len({x.name for x in reader.tensors})) != tensors:
            raise ModelError(f"{path.name} and the parts beside it have {found} of {tensors} tensors; {_AGAIN}")
    return reader


def attention_implementation(config: Any) -> str:
    """The attention implementation to load a causal language model with: SDPA, or `eager` where its class has none."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    classes = classes if isinstance(classes, tuple) else (classes,)
    return "sdpa" if all(x._supports_sdpa for x in classes) else "eager"


def _cannot_load(source: Path, reason: str) -> ModelError:
    return ModelError(f"cannot load model '{source}': {reason}")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' bars and advice off the screen; errors still raise."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _reading_gguf(label: str, progress: Progress) -> Iterator[None]:
    """Gives transformers a file in parts as one, and `progress` in the place of the bar that it always prints."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reader

    bar, reader_class = getattr(reader, "tqdm", None), gguf.GGUFReader  # a version without a bar shows nothing

    def count(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        with progress(label, len(tensors), "tensors") as advance:
            for tensor in tensors:
                yield tensor
                advance(1)

    reader.tqdm, gguf.GGUFReader = count, read_gguf
    try:
        yield
    finally:
        reader.tqdm, gguf.GGUFReader = bar, reader_class


def _load(
    source: Path, folder: Path, dtype: torch.dtype, config: Any, *, device_map: Any = None, **gguf: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads with transformers and checks that every weight came from the file."""
    options: dict[str, Any] = {**_LOCAL, **gguf}
    # mismatched sizes are reported below, by name
    reading = {"weights_only": True, "ignore_mismatched_sizes": True, "output_loading_info": True, **options}
    with quiet_transformers():
        with _explained(source, "its weights cannot be read"):
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, config=config, device_map=device_map, **reading
            )
        shapes = [f"{name} {list(theirs)} instead of {list(ours)}" for name, theirs, ours in info["mismatched_keys"]]
        for what, names in (  # otherwise random weights take the place of those that are not there
            ("weights are missing", info["missing_keys"]),
            ("weights have other shapes than config.json says", shapes),
            ("weights are not of the model that config.json describes", info["unexpected_keys"]),
        ):
            if names:
                first = ", ".join(sorted(names)[:_SHOWN_NAMES])
                more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
                raise _cannot_load(source, f"{what}: {first}{more}; use the config and all weights of one model")
        with _explained(source, f"its tokenizer cannot be read; {_COPY_TOKENIZER}"):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **options)
    tokenizer.clean_up_tokenization_spaces = False  # as Llama 3's config has it, " !=" would be read as "!="
    return model, tokenizer


@contextmanager
def _explained(source: Path, what: str) -> Iterator[None]:
    """Makes a `ModelError` of whatever a reader raises on bad data; running out of memory stays what it is."""
    try:
        yield
    except (KvcliError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # readers of foreign files raise everything, down to plain Exception
        raise _cannot_load(source, f"{what} ({type(error).__name__}: {error_text(error)[:200]})") from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        values = json.loads((folder / name).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _cannot_load(folder, f"{name} cannot be read ({error_text(error)}); {_AGAIN}") from error
    if not isinstance(values, dict):
        raise _cannot_load(folder, f"{name} is not a JSON object; {_AGAIN}")
    return values


def _check_weight_files(folder: Path, quantized: bool) -> None:
    """Refuses weights that are missing, cut off, there twice or would be cast; of safetensors, headers are read."""
    files = dict[str, str]()
    for name in _weight_files(folder):
        if not (folder / name).is_file():
            raise _cannot_load(folder, f"{name} is missing; {_AGAIN}")
        if name.endswith(".safetensors"):
            try:
                with safe_open(folder / name, framework="pt") as file:
                    kinds: dict[str, Any] = {x: file.get_slice(x).get_dtype() for x in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise _cannot_load(folder, f"{name} is truncated or damaged ({error}); {_AGAIN}") from error
        else:
            with _explained(folder, "its weights cannot be read"):
                kinds = {x: y.dtype for x, y in torch.load(folder / name, "meta", weights_only=True).items()}
        # of a tensor that is there twice transformers takes the last, whatever the index says
        if twice := next((x for x in kinds if x in files), None):
            raise _cannot_load(folder, f"{twice} is in {files[twice]} and in {name}; {_AGAIN}")
        files |= dict.fromkeys(kinds, name)
        odd = (x for x, kind in kinds.items() if x.endswith(("weight", "_proj")) and kind not in _FLOATS)
        if not quantized and (first := next(odd, None)):
            raise _cannot_load(folder, f"{first} is of dtype {kinds[first]}, and config.json names no quantization")


def _weight_files(folder: Path) -> list[str]:
    """Names of the files that hold the weights, in the order in which transformers looks for them."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return [name]
        index = f"{name}.index.json"
        if (folder / index).is_file():
            shards = _read_json(folder, index).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise _cannot_load(folder, f"{index} names no files; {_AGAIN}")
            names = sorted({str(shard) for shard in shards.values()})
            if outside := [shard for shard in names if Path(shard).name != shard]:
                raise _cannot_load(folder, f"{index} names {outside[0]}, which is not in the folder")
            return names
    raise _cannot_load(folder, "it has no weights; model.safetensors is missing")
