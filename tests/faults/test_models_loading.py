"""Model folders that are damaged, incomplete, contradictory or hostile: one line each, and no code of theirs runs."""

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
from kvcli.models.hub import check_model_name
from kvcli.models.load import load_model
from kvcli.spec import ModelSpec

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
O_PROJ = "model.layers.1.self_attn.o_proj.weight"
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
BOTH, F8 = json.dumps({"weight_map": {O_PROJ: SHARDS[0], "x": SHARDS[1]}}), torch.float8_e4m3fn
Change = Callable[[Path], Any]


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
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("standard input was read"))
    return Path(shutil.copytree(saved, tmp_path / "model"))


def refusal(source: Path | str, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(source), device="cpu", **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def config(**changes: Any) -> Change:
    return lambda folder: change_json(folder / "config.json", **changes)


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return rewrite


def file(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_bytes(content.encode(errors="surrogateescape"))


def renamed(name: str, new: str, *changes: Change) -> Change:
    return lambda folder: [(folder / name).rename(folder / new), *(change(folder) for change in changes)]


def pickled_in_int8(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    torch.save({**tensors, O_PROJ: tensors[O_PROJ].to(torch.int8)}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def write_code(folder: Path, name: str = "evil.py") -> Path:
    """Code that leaves a file where it ran."""
    trace = folder.parent / "it_ran"
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    return trace


CODE = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}


def test_code_of_a_model_folder_is_never_run_nor_asked_for(folder: Path) -> None:
    trace = write_code(folder)
    change_json(folder / "config.json", auto_map=CODE, model_type="evil")
    assert "needs Python code of its repository, which kvcli never runs" in refusal(folder)
    assert not trace.exists()


def test_code_beside_a_known_architecture_is_ignored_and_no_reader_is_asked_to_trust_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = write_code(folder)
    write_code(folder, "custom_generate/generate.py")
    change_json(folder / "config.json", auto_map=CODE)
    change_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Evil"]})
    trusted: list[Any] = []
    for reader in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):

        def read(*args: Any, original: Any = reader.from_pretrained, **options: Any) -> Any:
            trusted.append(options.get("trust_remote_code"))
            assert options.get("weights_only", "none are read") in (True, "none are read")
            return original(*args, **options)

        monkeypatch.setattr(reader, "from_pretrained", read)
    loaded = load_model(str(folder), device="cpu")
    assert loaded.spec.num_layers == 3
    assert loaded.tokenizer("w5 w6")["input_ids"] == [5, 6]
    assert trusted == [False] * max(3, len(trusted))
    assert not trace.exists()


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


IN_FOLDER = "cannot load model '{folder}': "
DAMAGES: list[tuple[Change, str]] = [
    (weights(lambda x: x.pop(O_PROJ)), f"weights are missing: {O_PROJ};"),
    (config(num_hidden_layers=6), "weights are missing: model.layers.3."),
    (config(num_hidden_layers=2), "not of the model that config.json describes: model.layers.2. ... and 6 more"),
    (config(intermediate_size=80), "model.layers.0.mlp.down_proj.weight [64, 96] instead of [64, 80]"),
    *(
        (weights(lambda x, value=value: x[O_PROJ][3].__setitem__(5, float(value))), f"not finite: layer 1, {O_PROJ};")
        for value in ("nan", "inf", "-inf")
    ),
    *(
        (
            lambda x, kept=kept: (x / WEIGHTS).write_bytes((x / WEIGHTS).read_bytes()[:kept]),
            f"{IN_FOLDER}{WEIGHTS} is truncated or damaged ... copy or download it again",
        )
        for kept in (0, 5, 1000, -1)
    ),
    (renamed(WEIGHTS, SHARDS[0], file(INDEX, BOTH)), f"{SHARDS[1]} is missing"),
    (
        renamed(WEIGHTS, SHARDS[0], lambda x: shutil.copy(x / SHARDS[0], x / SHARDS[1]), file(INDEX, BOTH)),
        f"lm_head.weight is in {SHARDS[0]} and in {SHARDS[1]};",
    ),
    (
        file("generation_config.json", '{"eos_token_id": "end"}'),
        "eos_token_id of the model's configs is token ids, not",
    ),
    (renamed(WEIGHTS, SHARDS[0], file(INDEX, '{"weight_map": []}')), f"{INDEX} names no files"),
    (renamed(WEIGHTS, SHARDS[0], file(INDEX, '{"weight_map": {"x": "../x"}}')), f"{INDEX} names ../x, which is not in"),
    *(
        (weights(lambda x, dtype=dtype: x.update({O_PROJ: x[O_PROJ].to(dtype)})), f"{O_PROJ} is of dtype {name}, and")
        for dtype, name in ((torch.int8, "I8"), (torch.bool, "BOOL"), (torch.complex64, "C64"), (F8, "F8_E4M3"))
    ),
    (pickled_in_int8, f"{O_PROJ} is of dtype torch.int8, and"),
    (config(quantization_config={"quant_method": "nobody"}), "transformers knows no quantization 'nobody'"),
    *(
        (lambda x, name=name: (x / name).unlink(), f"{IN_FOLDER}it has no  ... {name}")
        for name in ("config.json", "tokenizer.json", WEIGHTS)
    ),
    *(
        (file("config.json", content), "config.json")
        for content in ("", "{", "[]", "[" * 100_000, "\udcff", '{"model_type": "llama"', "null")
    ),
    *(
        (file("tokenizer.json", content), "its tokenizer cannot be read")
        for content in ("", "{}", "[]", '{"model": {"type": "WordLevel", "vocab": 3}}')
    ),
    (file("adapter_config.json", "{}"), "it holds an adapter; merge it into its base model"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_folder_without_a_whole_model_is_refused_in_words(folder: Path, damage: Change, said: str) -> None:
    damage(folder)
    message = refusal(folder)
    assert all(part.replace("{folder}", str(folder)) in message for part in said.split(" ... "))


def test_no_space_is_taken_out_of_texts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 3's config asks for it; a text that is read back would be another one."""
    monkeypatch.setattr(PreTrainedTokenizerFast, "clean_up_tokenization", lambda *_: pytest.fail("it was"))
    change_json(folder / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    assert load_model(str(folder), device="cpu").tokenizer.decode([5, 6]) == "w5 w6"


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    folder = save(make_model("llama", tie_word_embeddings=True), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    model: Any = load_model(str(folder), device="cpu").model
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_weights_beyond_the_range_of_float16_are_refused(folder: Path) -> None:
    weights(lambda x: x["lm_head.weight"][0].__setitem__(0, 1e5))(folder)
    load_model(str(folder), device="cpu")
    assert "not finite: lm_head.weight;" in refusal(folder, dtype=torch.float16)


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


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_attention_heads": x} for x in (0, "four", 3)),
        *({"num_key_value_heads": x} for x in (3, -2)),
        *({"num_hidden_layers": x} for x in (-1, 0, 10**9)),
        *({"hidden_size": x} for x in (-64, None)),
        *({"head_dim": x} for x in (15, 2**63)),
        {"vocab_size": 0},
        *({"max_position_embeddings": x} for x in ("long", 0)),
        *({"rope_parameters": {**LONGROPE, x: [1.0] * 3}} for x in ("short_factor", "long_factor")),
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


@pytest.mark.parametrize("name", ["/no-folder/x", "./x", "../x", "~/no-such-model", "a/b/c", "smollm2-135", "x" * 300])
def test_a_folder_that_does_not_exist(name: str) -> None:
    assert f"cannot load model '{name}': there is no such folder" in (message := refusal(name))
    assert ("did you mean 'smollm2-135m'?" in message) == (name == "smollm2-135")
    with pytest.raises(ModelError, match="there is no such folder"):
        check_model_name(name)


def test_a_file_a_revision_of_a_folder_a_device_without_data_and_other_families_are_refused(folder: Path) -> None:
    assert "it is a file; name its folder" in refusal(folder / WEIGHTS)
    with pytest.raises(UsageError, match="'meta' holds no data"):
        load_model(str(folder), device="meta")
    with pytest.raises(UsageError, match="no revision 'main'"):
        load_model(str(folder), device="cpu", revision="main")
    change_json(folder / "config.json", model_type="t5")
    with pytest.raises(UnsupportedModelError, match="'t5' is no causal language model"):
        load_model(str(folder))
