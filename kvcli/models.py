"""Loading models and tokenizers: the built-in model, names on a hub, local folders and GGUF files.

This module does not know what is done with a model once it is loaded, nor where the built-in model is downloaded from.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvcli.builtin_models import BUILTIN_MODELS, DEFAULT_MODEL, BuiltinModel, Say, cache_folder, download_gguf
from kvcli.errors import ModelError, UnsupportedModelError
from kvcli.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with its tokenizer and specification.

    Attributes:
        name: what the user asked for.
        model: in eval mode, on its device.
        tokenizer: its tokenizer, with a padding token.
        spec: shapes of its attention.
        fingerprint: of its shapes and weights; an artifact is bound to it.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec
    fingerprint: str

    def identity(self) -> dict[str, Any]:
        """Which model it is, as plain JSON values for manifests: `model`, `fingerprint` and `spec`."""
        return {"model": self.name, "fingerprint": self.fingerprint, "spec": self.spec.to_dict()}


def load_model(
    name: str = DEFAULT_MODEL,
    *,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    base_config: str | None = None,
    say: Say = lambda line: None,
) -> LoadedModel:
    """Loads a model by built-in name, hub name, local folder or GGUF file.

    Args:
        name: `smollm2-135m`, `org/model`, a folder, or a path that ends in .gguf.
        device: torch device; default CUDA when there is one, else CPU.
        dtype: default bfloat16 on CUDA, float32 on CPU.
        base_config: for GGUF files, a hub name or folder whose config (RoPE scaling above all) is used.
        say: called with a line about what takes time.

    Returns:
        The model in eval mode on its device, with its tokenizer, spec and fingerprint.

    Raises:
        ModelError: the model cannot be found, verified or loaded.
        UnsupportedModelError: an architecture kvcli does not compress.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if chosen.type == "cuda" else torch.float32)
    if name in BUILTIN_MODELS:
        model, tokenizer = _load_pretrained(fetch_builtin(BUILTIN_MODELS[name], say), dtype, {})
    elif name.endswith(".gguf"):
        model, tokenizer = _load_gguf(Path(name), dtype, base_config)
    else:
        model, tokenizer = _load_pretrained(name, dtype, {})
    spec = ModelSpec.from_config(model.config)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.to(chosen).eval()
    return LoadedModel(name, model, tokenizer, spec, fingerprint(model, spec))


def fingerprint(model: torch.nn.Module, spec: ModelSpec) -> str:
    """Identifies a model by its shapes and a sample of its key and value projections.

    Returns:
        16 hexadecimal digits of the shapes' sha256, a colon, and two weights per projection as float16 in hexadecimal;
        to be compared with `same_model`, because a model loaded in another dtype has its weights rounded.
    """
    shapes = hashlib.sha256(json.dumps(spec.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
    sample = [
        weight.detach().flatten()[[0, weight.numel() // 2]].to("cpu", torch.float16)
        for name, weight in sorted(model.named_parameters())
        if name.endswith(("k_proj.weight", "v_proj.weight"))
    ]
    return f"{shapes}:{b''.join(x.numpy().tobytes() for x in sample).hex()}"


def same_model(first: str, second: str) -> bool:
    """Whether two fingerprints are of the same model, up to the rounding of 16-bit dtypes."""
    if len(first) != len(second) or first.split(":", maxsplit=1)[0] != second.split(":", maxsplit=1)[0]:
        return False
    a, b = (torch.frombuffer(bytearray.fromhex(x.split(":")[1]), dtype=torch.float16).float() for x in (first, second))
    return bool(((a - b).abs() <= 0.01 * a.abs() + 1e-6).all())


def fetch_builtin(builtin: BuiltinModel, say: Say) -> Path:
    """Downloads, checks and converts a built-in model once; later calls return the safetensors copy.

    Returns:
        The folder of the converted model.

    Raises:
        ModelError: a download that failed or has another sha256.
    """
    folder = cache_folder() / "models" / builtin.name
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{builtin.name}-") as scratch:
        gguf = download_gguf(builtin, Path(scratch), say)
        say("converting the GGUF file to safetensors")
        model, tokenizer = _load_gguf(gguf, torch.float16, None)
        converted = Path(scratch) / "converted"
        _drop_gguf_quantization(model)
        model.save_pretrained(converted)
        tokenizer.save_pretrained(converted)
        try:
            converted.rename(folder)
        except OSError:  # another process was faster
            if not (folder / "config.json").is_file():
                raise
    return folder


def _load_pretrained(
    source: str | Path, dtype: torch.dtype, extra: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet_transformers():
            if not extra:  # refuse by name before gigabytes of weights are read
                ModelSpec.from_config(AutoConfig.from_pretrained(source))
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **extra)
            tokenizer = AutoTokenizer.from_pretrained(source, **extra)
    except UnsupportedModelError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        built_in = ", ".join(BUILTIN_MODELS)
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ModelError(
            f"cannot load model '{source}': {reason} (expected {built_in}, a hub name, a folder or a .gguf file)"
        ) from error
    return model, tokenizer


def _load_gguf(
    path: Path, dtype: torch.dtype, base_config: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a GGUF file through transformers, unless that would lose the RoPE scaling."""
    if not path.is_file():
        raise ModelError(f"no such GGUF file: {path}")
    extra: dict[str, Any] = {"gguf_file": path.name}
    if base_config is not None:
        from transformers import AutoConfig

        extra["config"] = AutoConfig.from_pretrained(base_config)
    elif _has_rope_freqs(path):
        raise ModelError(
            f"{path.name} keeps its RoPE scaling in a rope_freqs tensor, which would be dropped on loading; "
            "name the original model's config with --base-config"
        )
    return _load_pretrained(path.parent, dtype, extra)


def _has_rope_freqs(path: Path) -> bool:
    from gguf import GGUFReader

    try:
        return any(tensor.name.startswith("rope_freqs") for tensor in GGUFReader(path).tensors)
    except (ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error


def _drop_gguf_quantization(model: PreTrainedModel) -> None:
    """Removes the GGUF quantization config, so that the dequantized weights can be saved."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keeps transformers' bars and advice off the screen while loading; errors still raise."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
