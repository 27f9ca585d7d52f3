"""A cache in a file: exact in another process, and refused where it would mean something else or is damaged."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_model
from passes import assert_equal, filled, go_on, ids, mask_of
from safetensors import safe_open
from safetensors.torch import load, save_file

import kvcli
from kvcli.attention.generation import SamplingConfig
from kvcli.cache.blocks import encode, unstack_layers
from kvcli.cache.context import Context
from kvcli.errors import CacheError
from kvcli.registry import METHODS, get_method
from kvcli.storage.atomic import temporary_path
from kvcli.storage.locks import lock
from kvcli.storage.manifest import json_sha256
from kvcli.text.generate import compress


@pytest.fixture
def saved(tiny_model: Any, attach: Any, tmp_path: Path) -> Path:
    """A file of 40 tokens of rtn-2."""
    path = tmp_path / "c.safetensors"
    with attach(tiny_model, "rtn") as session:
        filled(session, 40).save(path, ids(1, 40))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_a_file_holds_a_cache_bit_for_bit(
    tiny_model: Any, attach: Any, tmp_path: Path, method: str, dtype: torch.dtype
) -> None:
    path = tmp_path / "new" / "c.safetensors"
    tiny_model.to(dtype)
    for lengths in ((3,), (40,), (40, 17, 9, 1)):
        mask = mask_of(*lengths)
        with attach(tiny_model, method) as session:
            cache = filled(session, *lengths)
            cache.save(path, ids(*mask.shape))
            context = Context.load(path)
            assert_equal(context.snapshot, cache.snapshot())
            expected = go_on(tiny_model, cache, mask)
        with attach(tiny_model, method) as session:
            again = session.load_cache(path)
            assert_equal(again.snapshot(), context.snapshot)
            assert all(map(torch.equal, go_on(tiny_model, again, mask), expected))
            assert_equal(again.snapshot(), cache.snapshot())
        assert torch.equal(context.input_ids, ids(*mask.shape))  # type: ignore[arg-type]
        assert [x.name for x in path.parent.iterdir()] == ["c.safetensors"]


IN_ANOTHER_PROCESS = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import interpret
from factories import make_model
import kvcli
torch.set_num_threads(1)
made = {}
for folder, method, artifact, settings in json.loads(sys.argv[2]):
    with kvcli.attach(make_model("llama"), method, artifact=artifact, **settings) as session:
        context = kvcli.Context.load(folder + "/c.safetensors")
        more = torch.cat((context.input_ids, torch.arange(5, 12)[None]), dim=1)
        sampling = kvcli.SamplingConfig(max_new_tokens=20)
        sequences = session.generate(more, cache=session.load_cache(context), sampling=sampling).sequences
        made[method] = sequences.tolist()
print(json.dumps(made))
"""


def test_another_process_makes_the_very_tokens(
    tiny_model: Any, tiny_artifact: Callable[[Any], Any], tmp_path: Path, repo_root: Path
) -> None:
    jobs, expected = [], {}
    for method in ("kivi-2", "squat-2", "qjl", "commvq"):
        grouped = {"group_size": 8} if method in ("kivi-2", "squat-2") else {}
        settings = {"sink_length": 2, "residual_length": 8, **grouped}
        folder, artifact = tmp_path / method, None
        if method == "commvq":
            artifact = str(tmp_path / "artifact")
            tiny_artifact(get_method(method)).save(artifact)
        with kvcli.attach(tiny_model, method, artifact=artifact, **settings) as session:
            cache = compress(session, ids(1, 40), prefill_chunk=15)
            cache.save(folder / "c.safetensors", ids(1, 40))
            more = torch.cat((ids(1, 40), torch.arange(5, 12)[None]), dim=1)
            made = session.generate(more, cache=cache, sampling=SamplingConfig(max_new_tokens=20))
        jobs.append((str(folder), method, artifact, settings))
        expected[method] = made.sequences.tolist()
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, str(repo_root / "tests" / "support"), json.dumps(jobs)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


def test_what_is_loaded_does_not_need_the_file_any_more(tiny_model: Any, attach: Any, saved: Path) -> None:
    with attach(tiny_model, "rtn") as session:
        cache = session.load_cache(saved)
        expected = cache.snapshot()
        with saved.open("r+b") as handle:
            handle.truncate(0)
        assert_equal(cache.snapshot(), expected)
        go_on(tiny_model, cache, mask_of(40))


def refused(session: Any, path: Path) -> str:
    with pytest.raises(CacheError) as caught:
        session.load_cache(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_flipped_missing_and_further_bytes_are_seen(tiny_model: Any, attach: Any, saved: Path) -> None:
    """Fault (files): a context file damaged, truncated, or with something added. Result: refused in one line wherever
    the byte is.
    """
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    chance = random.Random(0)
    places = [chance.randrange(stop) for stop in (header, len(content)) for _ in range(100)]
    with attach(tiny_model, "rtn") as session:
        for place in [*range(9), header - 1, header, len(content) - 1, *places]:
            for bit in (1, 0x20, 0x80):
                changed = bytearray(content)
                changed[place] ^= bit
                saved.write_bytes(changed)
                assert "damaged" in refused(session, saved) or place < header, f"byte {place}"
        for other in (*(content[:x] for x in (0, 1, 8, 9, 100, len(content) // 2, len(content) - 1)), content + b"\0"):
            saved.write_bytes(other)
            assert "damaged" in refused(session, saved)
        saved.write_bytes(content)
        session.load_cache(saved)


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Changes record and tensors of a file, whose checksums are made to agree.

    `change` gets the fields of the record, and the tensors of `tokens`, `first` and `last` by these names.
    """
    with safe_open(path, framework="pt") as handle:
        fields = json.loads(handle.metadata()["kvcli"])
        content = {name: handle.get_tensor(name).numpy().tobytes() for name in handle.keys()}  # noqa: SIM118
    names = [name for name in ("tokens", "first", "last") if fields[name] is not None]
    blocks = {name: unstack_layers(load(content[fields[name]["digest"]][: fields[name]["bytes"]])) for name in names}
    before = dict(fields)
    change(fields, blocks)
    for name, tensors in blocks.items():
        block, data = encode({key: x.clone() for key, x in tensors.items()})
        content[block.digest] = data
        if fields.get(name) == before[name]:
            fields[name] = {"digest": block.digest, "bytes": block.bytes}
    wanted = [fields.get("tokens"), fields.get("first"), *(fields.get("coded") or ()), fields.get("last")]
    digests = {x["digest"] for x in wanted if isinstance(x, dict)} & content.keys()
    padded = {x: bytearray(content[x]) + bytes(-len(content[x]) % 8) for x in digests}
    fields.pop("sha256")
    metadata = {"kvcli": json.dumps({**fields, "sha256": json_sha256(fields)})}
    save_file({x: torch.frombuffer(data, dtype=torch.uint8) for x, data in padded.items()}, path, metadata)


CONTRADICTIONS: dict[tuple[int, ...], list[tuple[Any, str]]] = {
    (40,): [
        (lambda fields, x: fields.update(format_version=1), "has format version 1; this kvcli reads version 5"),
        (lambda fields, x: fields.pop("counts"), "is damaged (counts: Field required)"),
        (lambda fields, x: fields["counts"].update(lengths=[39]), "is no context that this kvcli reads"),
        (lambda fields, x: fields["counts"].update(lengths=[2**41]), "is damaged (counts.lengths.0"),
        (lambda fields, x: fields["counts"].update(lengths="x"), "is damaged (counts.lengths"),
        (lambda fields, x: fields["counts"].update(ring=2**39), ""),
        (lambda fields, x: fields["identity"].update(method="other"), "unknown method 'other'"),
        (lambda fields, x: fields["identity"].update(method=3), "method: Input should be a valid string"),
        (lambda fields, x: fields["identity"].pop("rope"), "rope: Field required"),
        (lambda fields, x: fields["identity"].update(rope={}), "its identity cannot be read"),
        (lambda fields, x: fields["identity"]["rope"].update(inv_freq="x"), "its identity cannot be read"),
        (lambda fields, x: fields["identity"].update(fingerprint="x"), "its identity cannot be read"),
        (lambda fields, x: fields["identity"]["config"].update(colour=1), "that this kvcli does not know"),
        (lambda fields, x: fields["identity"].update(codecs={"sample": ["x"]}), "its identity cannot be read"),
        (lambda fields, x: fields.update(identity=[]), "is damaged (identity"),
        (lambda fields, x: fields.update(notes=3), "is damaged (notes"),
        (lambda fields, x: fields.update(last=None), "parts that cut rows or groups of tokens apart"),
        (lambda fields, x: fields.update(first=fields["last"]), "it must be torch.float32"),
        (lambda fields, x: fields.update(tokens=fields["last"]), "token ids does not hold those of 40 tokens"),
        (lambda fields, x: x["tokens"].update(input_ids=x["tokens"]["input_ids"][:, 1:]), "token ids does not hold"),
        (lambda fields, x: x["first"].update(more=torch.zeros(3)), "a tensor more, which this model and method have"),
    ],
    (40, 17): [
        (lambda fields, x: x["first"].pop("valid"), "token ids of more or fewer tokens"),
        (lambda fields, x: x["first"].update(valid=~x["first"]["valid"]), "padding marks do not agree"),
        (lambda fields, x: x["first"].pop("positions"), "positions do not agree"),
        (lambda fields, x: x["tokens"].update(input_ids=x["tokens"]["input_ids"][:, 1:]), "token ids of more or fewer"),
        (lambda fields, x: x["tokens"].update(input_ids=x["tokens"]["input_ids"][:1]), "token ids does not hold"),
        (lambda fields, x: fields.update(part_tokens=8), "parts that cut rows or groups of tokens apart"),
        (lambda fields, x: fields.update(coded=[fields["first"]]), "more or fewer blocks than its tokens have"),
    ],
}
"""Changes of the fields and tensors of a record of rows of these lengths, and what is said of them."""


@pytest.mark.parametrize(
    ("lengths", "change", "said"), [(lengths, *x) for lengths, changes in CONTRADICTIONS.items() for x in changes]
)
def test_contents_that_contradict_themselves(
    tiny_model: Any, attach: Any, tmp_path: Path, lengths: tuple[int, ...], change: Any, said: str
) -> None:
    path = tmp_path / "c.safetensors"
    with attach(tiny_model, "rtn") as session:
        filled(session, *lengths).save(path, ids(len(lengths), 40))
        session.load_cache(path)
        rewritten(path, change)
        if said:
            assert said in refused(session, path)
        else:
            session.load_cache(path)


def test_files_of_others(tiny_model: Any, attach: Any, tmp_path: Path) -> None:
    with attach(tiny_model, "rtn") as session:
        for missing in (tmp_path / "none", tmp_path):
            assert "there is no such file" in refused(session, missing)
        (tmp_path / "text").write_text("hello")
        assert "damaged" in refused(session, tmp_path / "text")
        for metadata, said in ((None, "is no context: kvcli did not write it"), ("[", "is damaged")):
            save_file({"x": torch.zeros(3)}, tmp_path / "other", metadata=metadata and {"kvcli": metadata})
            assert said in refused(session, tmp_path / "other")


def test_other_settings_or_another_method_model_dtype_or_rope_are_refused(
    tiny_model: Any, attach: Any, saved: Path
) -> None:
    def of_frequencies(factor: float) -> Any:
        model = make_model("llama")
        model.model.rotary_emb.inv_freq *= factor
        return model

    changed = make_model("llama")
    changed.model.layers[1].self_attn.k_proj.weight.data += 0.1
    theta = {"rope_type": "default", "rope_theta": 5e4}
    for model, method, changes, said in [
        (tiny_model, "fp8", {}, "method 'rtn', not 'fp8'"),
        (make_model("llama", num_hidden_layers=2), "rtn", {}, "another model, LlamaForCausalLM: the shapes differ"),
        (changed, "rtn", {}, "another model"),
        (make_model("llama", rope_parameters=theta), "rtn", {}, "another model"),
        (of_frequencies(1.01), "rtn", {}, "other RoPE frequencies"),
        (make_model("llama").bfloat16(), "rtn", {}, "the model in float32, which is in bfloat16 here"),
        (tiny_model, "rtn", {"residual_length": 17}, "residual_length 6, which is 17 here"),
        (tiny_model, "rtn", {"sink_length": 0}, "sink_length 2, which is 0 here"),
        (tiny_model, "rtn", {"flush_block": 3}, "flush_block 1, which is 3 here"),
        (tiny_model, "rtn", {"v_bits": 4}, "v_bits 2, which is 4 here"),
        (tiny_model, "rtn", {"layers": [0, 1]}, "layers 0, 1, 2 compressed, not 0, 1"),
    ]:
        with attach(model, method, **changes) as session:
            assert f"was made with {said}" in refused(session, saved)
    with attach(of_frequencies(1 + 1e-6), "rtn") as session:
        session.load_cache(saved)


def test_another_artifact_is_refused(tiny_model: Any, tiny_artifact: Callable[[Any], Any], tmp_path: Path) -> None:
    artifact = tiny_artifact(get_method("commvq"))
    with kvcli.attach(tiny_model, "commvq", artifact=artifact) as session:
        filled(session, 40).save(tmp_path / "c")
    tensors = {name: x.clone() for name, x in artifact.tensors.items()}
    tensors["layers.2.key.codebook"].view(-1)[-1] += 1
    changed = kvcli.Artifact(artifact.metadata, tensors)
    with kvcli.attach(tiny_model, "commvq", artifact=changed) as session:
        assert "was made with another artifact" in refused(session, tmp_path / "c")
    with kvcli.attach(tiny_model, "commvq", artifact=artifact) as session:
        session.load_cache(tmp_path / "c")


def test_codecs_of_other_projections_are_refused(tiny_model: Any, attach: Any, tmp_path: Path) -> None:
    with attach(tiny_model, "qjl") as session:
        filled(session, 40).save(tmp_path / "c")
    with attach(tiny_model, "qjl") as session:
        session.codecs[1].key.sketch.neg_()
        assert "codecs of other projections or tables" in refused(session, tmp_path / "c")
    with attach(tiny_model, "qjl") as session:
        session.codecs[1].key.sketch.mul_(1 + 1e-6)  # another machine's rounding
        session.load_cache(tmp_path / "c")


def test_what_cannot_be_saved_makes_no_file(tiny_model: Any, attach: Any, tmp_path: Path) -> None:
    """Nor what has no snapshot: see test_snapshot."""
    with attach(tiny_model, "rtn") as session:
        with pytest.raises(CacheError, match="holds no token"):
            session.new_cache().save(tmp_path / "c")
        with pytest.raises(CacheError, match=r"input_ids are \[1, 41\], but the cache holds \[1, 40\]"):
            filled(session, 40).save(tmp_path / "c", ids(1, 41))
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_whole_or_not_at_all(
    tiny_model: Any, attach: Any, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    with attach(tiny_model, "rtn") as session:
        cache = session.load_cache(saved)
        go_on(tiny_model, cache, mask_of(40))
        with monkeypatch.context() as patched:
            patched.setattr("kvcli.cache.context.replacing", lambda *args, **kwargs: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                cache.save(saved)
        assert saved.read_bytes() == before
        with (
            lock(temporary_path(saved), CacheError("busy"), make_file=True),
            pytest.raises(CacheError, match="another kvcli process writes"),
        ):
            cache.save(saved)
        assert saved.read_bytes() == before
        cache.save(saved)
        assert saved.read_bytes() != before
        assert session.load_cache(saved).get_seq_length() == 65


def test_equal_caches_make_equal_files(tiny_model: Any, attach: Any, tmp_path: Path) -> None:
    with attach(tiny_model, "kivi") as session:
        for name in "ab":
            filled(session, 40, 17).save(tmp_path / name)
    assert Context.load(tmp_path / "a").save(tmp_path / "c") == (tmp_path / "c").stat().st_size
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1
