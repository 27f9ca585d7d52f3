"""Names of methods with their bits, and what identifies a model, against values written out."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from factories import make_model
from families import make
from pydantic import ValidationError

import kvcli
from kvcli.commands.paths import model_folder
from kvcli.errors import ConfigError, UsageError, explain
from kvcli.models.fingerprint import differs, fingerprint
from kvcli.registry import get_method, method_name, parse_name
from kvcli.spec import ModelSpec


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("org/Model", "model"),
        ("a/b.gguf", "b"),
        ("x/", "x"),
        *((x, "model") for x in ("..", ".", "a/..", "/", "...gguf")),
    ],
)
def test_a_model_of_any_name_has_a_folder_below_runs(model: str, folder: str) -> None:
    assert model_folder(model, "samples").parts == ("runs", folder, "samples")


def bits(number: int) -> dict[str, int]:
    return {"k_bits": number, "v_bits": number}


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("kivi-2", "kivi", bits(2)),
        ("squat-pre-4", "squat-pre", bits(4)),
        ("kivi-k4v2", "kivi", {"k_bits": 4, "v_bits": 2}),
        ("squat-pre-k1v8", "squat-pre", {"k_bits": 1, "v_bits": 8}),
        ("turboquant-k3v16", "turboquant", {"k_bits": 3, "v_bits": 16}),
        ("commvq-1.5", "commvq", {"bits": 1.5}),
        ("commvq-1", "commvq", {"bits": 1.0}),
        ("fp8", "fp8", {}),
    ],
)
def test_a_name_is_a_method_and_the_settings_of_its_bits(text: str, name: str, settings: dict[str, Any]) -> None:
    assert parse_name(text) == (name, settings)
    assert method_name(name, settings) == text


def test_a_name_has_bits_unless_layers_have_their_own() -> None:
    assert parse_name("kivi") == ("kivi", {})
    assert method_name("kivi", {}) == "kivi-2"
    assert method_name("kivi-4", {"group_size": 64}) == "kivi-4"
    assert method_name("kivi", {"k_bits": 4}) == "kivi-k4v2"
    assert method_name("kivi", {"k_bits": [4, 2, 2]}) == "kivi"


@pytest.mark.parametrize("text", ["fp8-2", "kivvi-2", "fp8-k4v2", "commvq-k2v1", "kivvi-k4v2", "kivi-v2k4"])
def test_a_name_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_name(text)


@pytest.mark.parametrize("text", ["kivi-9", "kivi-k4v3"])
def test_bits_that_a_method_does_not_take_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_name(text)


def test_a_fingerprint_is_the_shapes_checksum_and_two_weights_per_projection() -> None:
    model = make_model("llama")
    spec = ModelSpec.from_config(model.config)
    shapes = hashlib.sha256(json.dumps(spec.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
    weights = [
        getattr(model.model.layers[layer].self_attn, name).weight.flatten()
        for layer in range(3)
        for name in ("k_proj", "v_proj")
    ]
    sample = torch.stack([x[i] for x in weights for i in (0, x.numel() // 2)]).to(torch.float16)
    assert fingerprint(model, spec) == f"{shapes}:{sample.detach().numpy().tobytes().hex()}"


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_bigcode", "ctrl", "phi3", "gpt_neox"])
def test_where_keys_and_values_come_from_one_projection_matrices_are_sampled(model_type: str) -> None:
    """Masks and positions are matrices, too, and tell no model from another; nor do adapters."""
    model = make(model_type)
    spec = ModelSpec.from_config(model.config)
    plain = fingerprint(model, spec)
    taken = [name for name, x in model.named_modules() if type(x).__name__ in ("Linear", "Conv1D")][:64]
    assert len(plain.split(":")[1]) == 8 * len(taken)
    one = next(x for name, x in model.named_modules() if name == taken[0])
    one.weight.data[0, 0] += 1
    assert differs(plain, fingerprint(model, spec)) is not None
    one.weight.data[0, 0] -= 1
    target = sorted({name.rpartition(".")[2] for name in taken} - {"lm_head", "embed_out", "0", "2"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, which reads what is deprecated
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=target, init_lora_weights=False))
    assert differs(plain, fingerprint(adapted, spec)) is None


def test_fingerprints_differ_by_shapes_and_by_weights() -> None:
    first = "0123456789abcdef:003c0040"  # 1 and 2 as float16
    assert differs(first, first) is None
    assert differs(first, "0123456789abcdef:003c0140") is None  # rounded: 2.002
    assert differs(first, "1123456789abcdef:003c0040") == "the shapes differ"
    assert str(differs(first, "0123456789abcdef:00400040")).startswith("weights of the key and value projections")
    assert differs(f"{first}:quantized", "0123456789abcdef:003c0140") is None
    with pytest.raises(ValueError, match="fingerprint"):
        differs(first, "")


def test_dir_shows_the_public_names_and_all_exist() -> None:
    assert dir(kvcli) == sorted(kvcli.__all__)
    assert all(hasattr(kvcli, name) for name in dir(kvcli))
    with pytest.raises(AttributeError, match="nothing"):
        kvcli.nothing  # noqa: B018


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(kvcli.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"k_bit": 2}, "there is no setting 'k_bit'; did you mean 'k_bits'?"),
        ({"colour": 2}, "there is no setting 'colour'; settings are sink_length, residual_length, flush_block, k_bits"),
        ({"k_bits": 3}, "k_bits: Input should be 1, 2, 4 or 8"),
        ({"group_size": 48}, "settings: residual_length 128 must be a positive multiple of group_size 48"),
    ],
)
def test_a_wrong_setting_is_explained(values: dict[str, int], said: str) -> None:
    config_cls = get_method("kivi").config_cls
    with pytest.raises(ValidationError) as caught:
        config_cls(**values)
    assert explain(caught.value, config_cls.model_fields).startswith(said)
