"""Model folders that are damaged, incomplete, contradictory or hostile: one line each, and no code of theirs runs."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kvcli.errors import ModelError, UnsupportedModelError, UsageError
from kvcli.models import load_model
from kvcli.spec import ModelSpec

WEIGHTS = "model.safetensors"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def save(model: Any, folder: Path) -> Path:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama"), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the model to damage; whatever asks on standard input fails the test."""

    def ask(*_: Any) -> str:
        raise AssertionError("standard input was read")

    monkeypatch.setattr(builtins, "input", ask)
    return Path(shutil.copytree(saved, tmp_path / "model"))


def refusal(source: Path | str, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(source), device="cpu", **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def write_code(folder: Path, name: str = "evil.py") -> Path:
    """Code that leaves a file where it ran."""
    trace = folder.parent / "it_ran"
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    return trace


def test_an_intact_folder_loads(folder: Path) -> None:
    loaded = load_model(str(folder), device="cpu")
    assert loaded.spec.num_layers == 3
    assert loaded.tokenizer("w5 w6")["input_ids"] == [5, 6]


def test_code_of_a_model_folder_is_never_run_nor_asked_for(folder: Path) -> None:
    trace = write_code(folder)
    classes = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    change_json(folder / "config.json", auto_map=classes, model_type="evil")
    assert "needs Python code of its repository, which kvcli never runs" in refusal(folder)
    assert not trace.exists()


def test_code_beside_a_known_architecture_is_ignored(folder: Path) -> None:
    trace = write_code(folder)
    write_code(folder, "custom_generate/generate.py")
    change_json(folder / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    change_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Evil"]})
    load_model(str(folder), device="cpu")
    assert not trace.exists()


def test_no_reader_is_asked_to_trust_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted: list[Any] = []
    for reader in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):

        def read(*args: Any, original: Any = reader.from_pretrained, **options: Any) -> Any:
            trusted.append(options.get("trust_remote_code"))
            assert options.get("weights_only", "none are read") in (True, "none are read")
            return original(*args, **options)

        monkeypatch.setattr(reader, "from_pretrained", read)
    load_model(str(folder), device="cpu")
    assert len(trusted) >= 3
    assert all(value is False for value in trusted)


def test_a_tokenizer_that_needs_code_is_refused(folder: Path) -> None:
    trace = write_code(folder)
    changes = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    change_json(folder / "tokenizer_config.json", **changes)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    assert "tokenizer" in refusal(folder)
    assert not trace.exists()


@pytest.mark.parametrize("field", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"])
def test_a_config_does_not_choose_the_attention_code(folder: Path, field: str) -> None:
    change_json(folder / "config.json", **{field: "nobody/evil-kernel"})
    assert load_model(str(folder), device="cpu").model.config._attn_implementation == "sdpa"


def test_missing_weights_are_named_and_not_replaced(folder: Path) -> None:
    change_weights(folder, lambda weights: weights.pop(O_PROJ))
    assert f"weights are missing: {O_PROJ};" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 6}, ["weights are missing: model.layers.3."]),
        ({"num_hidden_layers": 2}, ["not of the model that config.json describes: model.layers.2.", "and 6 more"]),
        ({"intermediate_size": 80}, ["model.layers.0.mlp.down_proj.weight [64, 96] instead of [64, 80]"]),
    ],
)
def test_weights_and_config_of_two_models_are_refused(folder: Path, changes: dict[str, int], said: list[str]) -> None:
    change_json(folder / "config.json", **changes)
    message = refusal(folder)
    assert all(part in message for part in said)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    folder = save(make_model("llama", tie_word_embeddings=True), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    model: Any = load_model(str(folder), device="cpu").model
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_with_layer_and_name(folder: Path, value: float) -> None:
    change_weights(folder, lambda weights: weights[O_PROJ][3].__setitem__(5, value))
    assert f"not finite: layer 1, {O_PROJ};" in refusal(folder)


def test_weights_beyond_the_range_of_float16_are_refused(folder: Path) -> None:
    change_weights(folder, lambda weights: weights["lm_head.weight"][0].__setitem__(0, 1e5))
    load_model(str(folder), device="cpu")
    assert "not finite: lm_head.weight;" in refusal(folder, dtype=torch.float16)


@pytest.mark.parametrize("kept", [0, 5, 1000, -1])
def test_a_truncated_weight_file_is_named_with_the_remedy(folder: Path, kept: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:kept])
    message = refusal(folder)
    assert f"cannot load model '{folder}': {WEIGHTS} is truncated or damaged" in message
    assert message.endswith("copy or download it again")


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    files = {O_PROJ: "model-00001-of-00002.safetensors", "lm_head.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert "model-00002-of-00002.safetensors is missing" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": []}))
    assert "model.safetensors.index.json names no files" in refusal(folder)


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_pickled_weights_are_read_as_data_only(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    load_model(str(folder), device="cpu")
    trace = folder.parent / "it_ran"
    torch.save({"lm_head.weight": Evil(trace)}, folder / "pytorch_model.bin")
    assert "its weights cannot be read" in refusal(folder)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", WEIGHTS])
def test_a_file_that_is_missing_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"cannot load model '{folder}': it has no " in (message := refusal(folder))
    assert name in message


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, "\udcff", '{"model_type": "llama"', "null"])
def test_a_config_that_is_no_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": "four"},
        {"num_attention_heads": 3},
        {"num_key_value_heads": 3},
        {"num_key_value_heads": -2},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**9},
        {"hidden_size": -64},
        {"hidden_size": None},
        {"head_dim": 15},
        {"head_dim": 2**63},
        {"vocab_size": 0},
        {"max_position_embeddings": "long"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "hot"}},
        {"rope_parameters": 3},
    ],
)
def test_shapes_that_no_model_has_are_refused_by_the_config_alone(folder: Path, changes: dict[str, Any]) -> None:
    change_json(folder / "config.json", **changes)
    (folder / WEIGHTS).unlink()
    assert "weights" not in (message := refusal(folder))
    assert "config" in message


def test_partial_rotary_embeddings() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    assert ModelSpec.from_config(make_model("llama", rope_parameters=rope).config).rope.rotary_dim == 16
    linear = AutoConfig.for_model("llama", rope_parameters={**rope, "rope_type": "linear", "factor": 2.0})
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor 0\.5"):
        ModelSpec.from_config(linear)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"type": "WordLevel", "vocab": 3}}'])
def test_a_damaged_tokenizer_is_said_to_be_that(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    assert "its tokenizer cannot be read" in refusal(folder)


def test_an_adapter_is_no_model_and_other_families_are_refused(folder: Path) -> None:
    change_json(folder / "config.json", model_type="t5")
    with pytest.raises(UnsupportedModelError, match="'t5' is no causal language model"):
        load_model(str(folder))
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "nobody/base"}))
    assert "it holds an adapter; merge it into its base model" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["/nonexistent/x", "./x", "../x", "~/no-such-model", "a/b/c", "smollm2-135", "x" * 300]
)
def test_a_folder_that_does_not_exist(name: str) -> None:
    assert f"cannot load model '{name}': there is no such folder" in refusal(name)


def test_typing_errors_and_files_get_a_hint(folder: Path) -> None:
    assert "did you mean 'smollm2-135m'?" in refusal("smollm2-135")
    assert "it is a file; name its folder" in refusal(folder / WEIGHTS)


def test_a_device_without_data_and_a_revision_of_a_folder_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="'meta' holds no data"):
        load_model(str(folder), device="meta")
    with pytest.raises(UsageError, match="no revision 'main'"):
        load_model(str(folder), device="cpu", revision="main")
