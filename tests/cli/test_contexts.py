"""`kvcli contexts`: what is listed, measured, removed, exported and imported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from console import imported, invoke, refused, result, says
from contexts_made import Maker, execute, flip_a_byte, tokens
from factories import load, make_model

import kvcli
from kvcli.commands.sizes import number
from kvcli.contexts import ContextStore
from kvcli.contexts.chunks import Chunk, ChunkStore
from kvcli.models import load as models

STORE = Path("runs/smollm2-135m/contexts")
SETTINGS = {"residual_length": 16, "group_size": 8, "k_bits": 2, "v_bits": 2}


@pytest.fixture
def made(tiny: Any) -> Maker:
    """Contexts `first` and `second` of 600 tokens in the default store, which begin alike."""
    store = ContextStore(STORE)
    with kvcli.attach(tiny, "kivi", **SETTINGS) as session:
        maker = Maker(tiny, session)
        for name, seed in (("first", 1), ("second", 2)):
            ids = torch.cat((tokens(300), tokens(300, seed)))
            store.put(maker.context(ids, maker.read(ids, chunk=100), source=f"{name}.txt"), name=name)
    return maker


def rows(*arguments: str) -> Any:
    return result("contexts", *arguments, "--json")


def test_chunks_of_engines_are_listed_by_model_and_method(tmp_path: Path) -> None:
    lost = [(0.01, 0.04), (0.03, 0.02)]
    codes = [Chunk(f"{i:040x}", bytes(100), "org/model klt-2", 700, x) for i, x in enumerate(lost)]
    ChunkStore(tmp_path, 10**6).put([*codes, Chunk("ff" * 20, bytes(50), "org/model states and windows", 50)])
    listed = rows("list", "--store", str(tmp_path))
    assert listed["rows"] == []
    assert {x["kind"]: (x["chunks"], x["bytes"]) for x in listed["chunks"]} == {
        "org/model klt-2": (2, 200),
        "org/model states and windows": (1, 50),
    }
    text = invoke("contexts", "list", "--store", str(tmp_path)).stdout
    says(text, "org/model klt-2", "7.0x", "0.0200 (0.0300)", "0.0300 (0.0400)", "chunks of engines, 250 B")
    assert "0 contexts" not in text


def test_what_lists_a_store_imports_no_torch(made: Maker) -> None:
    """To list a store takes no longer than to start the program."""
    lines = ("contexts list", "contexts show first", "library list")
    assert [line for line in lines if {"torch", "transformers"} & imported(line)] == []


def test_list_and_show(made: Maker) -> None:
    listed = rows("list")
    assert [row["name"] for row in listed["rows"]] == ["second", "first"]
    assert listed["unused_bytes"] == 0
    shown = rows("show", "first")
    assert shown == listed["rows"][1]
    assert (shown["tokens"], shown["blocks"], shown["shared_blocks"], shown["method"]) == (600, 2, 1, "kivi-2")
    assert shown["source"] == "first.txt"
    assert 0 < shown["shared_bytes"] < shown["bytes"] < shown["fp16_bytes"]
    says(invoke("contexts", "list").stdout, "first.txt", "2 contexts")
    text = invoke("contexts", "show", "first").stdout
    says(text, "600 tokens of first.txt, tiny in float32, method kivi", "2 blocks of 256 tokens, 1 of them shared")
    assert "KL" not in text


def test_show_measures_what_the_copy_loses_with_the_model_that_made_it(made: Maker, monkeypatch: Any) -> None:
    show = ("contexts", "show", "first", "--kl", "--kl-tokens")
    kl = result(*show, "50", "--json")["kl"]
    assert kl["num_tokens"] == 50
    assert 0 < kl["kl_mean"] < 1
    assert f"over the last 50 tokens: KL {number(kl['kl_mean'])} nats" in invoke(*show, "50").stdout
    assert "no block of 256 codes" in refused(*show, "590")
    other = replace(load(make_model("qwen2")), tokenizer=made.loaded.tokenizer)
    monkeypatch.setattr(models, "load_model", lambda name, **_: other)
    said = refused(*show, "50", code=1)
    assert "context 'first' cannot be used here: it was made with another model, tiny" in said


def test_verify_says_what_is_damaged(made: Maker) -> None:
    assert "2 contexts, all whole" in invoke("contexts", "verify").stdout
    flip_a_byte(STORE, "first", "last")
    damaged = result("contexts", "verify", exit_code=1)
    says(damaged.stderr, "error: 1 of 2 contexts damaged: first", "kvcli contexts rm first")
    assert list(result("contexts", "verify", "--json", exit_code=1)["damaged"]) == ["first"]
    result("contexts", "verify", "second")
    assert "did you mean 'second'?" in refused("contexts", "verify", "secnd", code=1)


def test_rm_and_prune(made: Maker) -> None:
    assert invoke("contexts", "rm", "first", "third").exit_code == 1
    assert len(rows("list")["rows"]) == 2
    assert invoke("contexts", "rm").exit_code == 2
    execute(ContextStore(STORE), "INSERT INTO blocks VALUES (?, 3)", "0" * 64)  # as a kill leaves it
    for suffix, content in ((".safetensors", b"abc"), (".safetensors.tmp", b"abcd")):
        (STORE / "blocks" / ("0" * 64 + suffix)).write_bytes(content)
    assert rows("list")["unused_bytes"] == 3
    assert "3 B that no context uses" in invoke("contexts", "list").stdout
    assert rows("prune")["freed_bytes"] == 7
    bytes_of_both = rows("list")["bytes"]
    pruned = rows("prune", "--max-bytes", f"{bytes_of_both - 1}B")
    assert pruned["evicted"] == ["first"]
    assert pruned["bytes"] + pruned["freed_bytes"] == bytes_of_both
    assert rows("rm", "second")["removed"] == ["second"]
    assert rows("list") == {"store": str(STORE), "bytes": 0, "unused_bytes": 0, "rows": [], "chunks": []}
    assert invoke("contexts", "prune", "--max-bytes", "much").exit_code == 2


def test_export_and_import(made: Maker, tmp_path: Path) -> None:
    exported = rows("export", "first", "--out", "a.safetensors")
    assert Path("a.safetensors").stat().st_size == exported["bytes"]
    assert invoke("contexts", "export", "second").stdout == "second.safetensors\n"
    imported = rows("import", "a.safetensors", "second.safetensors", "--store", "other")
    assert [row["name"] for row in imported["rows"]] == ["a", "second"]
    assert imported["rows"][1]["shared_bytes"] > 0
    assert invoke("contexts", "verify", "--store", "other").exit_code == 0
    again = ("contexts", "import", "second.safetensors", "--store", "other", "--name", "a")
    assert "replace it with --overwrite" in refused(*again, code=1)
    assert "a: 600 tokens" in result(*again, "--overwrite").stdout
    assert invoke("contexts", "import", "a.safetensors", "second.safetensors", "--name", "x").exit_code == 2
    Path("bad.safetensors").write_bytes(b"abc")
    for wrong in (("import", "bad.safetensors"), ("import", "none.safetensors"), ("export", "third")):
        assert invoke("contexts", *wrong, "--store", "other").exit_code == 1


def test_export_replaces_nothing_unasked(made: Maker) -> None:
    Path("kept.txt").write_text("mine")
    export = ("contexts", "export", "first", "--out")
    assert "exists already; use --overwrite" in refused(*export, "kept.txt")
    assert Path("kept.txt").read_text() == "mine"
    result(*export, "kept.txt", "--overwrite")
    assert kvcli.Context.load(Path("kept.txt")).snapshot.num_tokens == 600
    Path("folder").mkdir()
    result(*export, "folder")
    assert Path("folder/first.safetensors").is_file()
    refused(*export, "folder")


def test_a_store_that_is_not_there(tiny: Any) -> None:
    """Stores beside it, as a server's, are named."""
    for arguments in (("list",), ("verify",), ("prune",), ("show", "a"), ("rm", "a"), ("export", "a")):
        line = refused("contexts", *arguments)
        assert "there is no store of contexts in runs/smollm2-135m/contexts" in line
        assert line.endswith("--store names another")
    STORE.with_name("served").mkdir(parents=True)
    (STORE.with_name("served") / "index.sqlite").touch()
    assert refused("contexts", "list").endswith("--store names another, as runs/smollm2-135m/served")
    STORE.mkdir(parents=True)
    for command in ("show", "export"):
        assert invoke("contexts", command).exit_code == 2


def test_a_context_that_is_nowhere_is_named_with_its_store(made: Maker) -> None:
    missing = refused("generate", "--context", "fist", "--prompt", "x", code=1)
    assert f"there is no file fist, and there is no context 'fist' in {STORE}; did you mean 'first'?" in missing
