"""`kvcli push` and `kvcli pull`: with huggingface_hub's own client and a hub on loopback, in folders and from URLs."""

import hashlib
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from console import SHORT, TEXT, compressed, refused, result, says
from huggingface_hub import constants
from loopback_hub import Hub, loopback_hub

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.metadata import front_matter, is_edited, with_checksum
from kvcli.artifact.recipe import Recipe
from kvcli.cli import share
from kvcli.eval.records import read_rows

REPO = "me/commvq-2"
NAMES = ("codec.safetensors", "kvcli.json")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with loopback_hub(monkeypatch, tmp_path / "cache") as made:
        yield made


def push(path: Path | str, target: Path | str = REPO, *options: str) -> tuple[str, str]:
    pushed = result("push", str(path), str(target), *options, "--json")
    return pushed["place"], pushed["sha256"]


def pull(source: str, *options: str) -> Path:
    return Path(result("pull", source, *options, "--json")["path"])


def same_files(first: Path, second: Path, *names: str) -> bool:
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def test_an_artifact_is_pushed_and_pulled_by_commit_and_digest(artifact: Path, hub: Hub) -> None:
    place, digest = push(artifact)
    commit, files = [*hub.commits[REPO].items()][-1]
    assert hub.private == {REPO: True}
    assert place == f"{REPO}@{commit}"
    assert digest == hashlib.sha256(files["SHA256SUMS"]).hexdigest()
    facts, own = result("inspect", str(artifact), "--json"), (artifact / "README.md").read_text()
    use, card = "kvcli generate tiny --artifact runs/tiny/commvq-2 --prompt", files["README.md"].decode()
    says(own, f"kvcli pull OWNER/NAME\n{use}")
    size = f"| size of codec.safetensors | {(artifact / NAMES[0]).stat().st_size:,} bytes |\n"
    bits = "| true bits per value | keys {keys:.2f}, values {values:.2f} |\n".format(**facts["bits"])
    says(card, f"kvcli pull {REPO}\n{use}", bits, size, f"| compressed | {facts['compressed']} |\n")
    assert "loss" not in card
    assert "[" not in card.rpartition("| settings")[2]  # fields of every layer
    assert files.keys() == {*NAMES, "README.md", "SHA256SUMS"}
    done = result("pull", place, "--sha256", digest)
    folder = Path("runs/tiny/commvq-2")
    assert done.stdout == f"{folder}\n"
    assert "next: kvcli generate tiny --artifact runs/tiny/commvq-2" in done.stderr
    assert same_files(artifact, folder, *NAMES)
    assert Artifact.load(folder).same_content(Artifact.load(artifact))
    assert pull(place) == folder  # again: nothing to do


@pytest.mark.parametrize("known", ["of the artifact", "of the method", ""])
def test_a_card_tells_a_loss_that_was_measured(artifact: Path, known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of, seal = "nats per token to the uncompressed model", json.loads((artifact / "kvcli.json").read_text())["sha256"]
    table = {"model": "tiny" if known else "other", "text": "essays", "tokens": 99, "window": "w"}
    Path("losses.json").write_text(json.dumps([{**table, "kl": {"commvq-2": 0.0123}}]))
    monkeypatch.setattr(share, "LOSSES", Path("losses.json"))
    measured = {"kl_mean": 0.0393, "tokens": 512, "corpus": "mine.txt"}
    recipe = Recipe(model="tiny", fingerprint="x", method="commvq", measured=measured, artifact_sha256="0" * 64)
    recipe = recipe.model_copy(update={"artifact_sha256": seal} if known == "of the artifact" else {})
    recipe.save(artifact.parent / "recipe.yaml")
    Path("shared").mkdir()
    push(artifact, "shared")
    said = {"of the artifact": f"KL 0.039 {of}, 512 tokens of mine.txt"}
    text = f"KL 0.012 {of}, 99 tokens of essays, w in full precision"
    said["of the method"] = f"not measured; in kvcli's records commvq-2 has {text}"
    lines = [line for line in Path("shared/README.md").read_text().splitlines() if "loss" in line]
    assert lines == ([f"| loss | {said[known]} |"] if known else [])


def test_a_card_tells_the_kl_that_was_measured_of_this_artifact(artifact: Path) -> None:
    """By the records beside it of most tokens, with its own settings; not by those of what was there before."""
    measure = ("eval", "kl", "tiny", "--artifact", str(artifact), "--seq-len", "64", "--chunk", "8")
    window = ("--residual-length", "8", "--corpus", "builtin:essays", "--out", f"{artifact.parent}/kl.jsonl")
    for more in (("1",), ("2",), ("3", "--setting", "residual_length=0")):
        result(*measure, *window, "--num-sequences", *more)
    rows = [x.model_dump() for x in read_rows(artifact.parent / "kl.jsonl") if x.artifact]
    assert [x["num_tokens"] for x in rows] == [64, 128, 192]
    Path("shared").mkdir()
    push(artifact, "shared")
    loss = f"{rows[1]['kl_mean']:.2g}"
    said = f"KL {loss} nats per token to the uncompressed model, suite kl, 128 tokens of builtin:essays"
    says((card := Path("shared/README.md")).read_text(), f"| loss | {said}, first 4 and last 8 in full precision |\n")
    made = Artifact.load(artifact)
    metadata = {**made.metadata, "provenance": {**made.metadata["provenance"], "seed": 7}}
    Artifact(metadata, made.tensors).save(artifact, overwrite=True)
    push(artifact, "shared")
    assert "KL" not in card.read_text()


@pytest.mark.parametrize("edited", [False, True])
def test_a_card_of_kvcli_is_renewed_and_one_that_was_edited_stays(
    artifact: Path, hub: Hub, tiny: Any, edited: bool
) -> None:
    Path("shared").mkdir()
    cards = (artifact / "README.md", Path("shared/README.md"))
    for place in ("shared", REPO):
        push(artifact, place)
    for card in cards:
        card.write_text(card.read_text().replace("no model weights", "none") if edited else with_checksum("# Stale\n"))
    list(hub.commits[REPO].values())[-1]["README.md"] = cards[1].read_bytes()
    before = cards[0].read_text()
    said = [result("export", "fitted", "--out", str(artifact), "--overwrite").stderr]
    assert (cards[0].read_text() == before) == edited
    cards[0].unlink()
    said += [result("push", str(artifact), str(place)).stderr for place in ("shared", REPO)]
    for text in (cards[1].read_text(), hub.found(REPO, "main")[1]["README.md"].decode()):  # type: ignore[index]
        assert ("holds codebooks and encoders, none;" in text) == edited
        assert "Stale" not in text
    assert ["was edited" in x for x in said] == [edited] * 3


def test_a_commit_pins_what_a_later_push_changes(artifact: Path, hub: Hub) -> None:
    (artifact / "README.md").write_bytes(edited := b"---\nlibrary_name: kvcli\n---\nMine.\n")
    first, digest = push(artifact)
    other = artifact.parent / "other"
    shutil.copytree(artifact, other)
    metadata = Artifact.load(artifact)
    Artifact({**metadata.metadata, "model": "another"}, metadata.tensors).save(other, overwrite=True)
    second, _ = push(other)
    assert hub.found(REPO, "main")[1]["README.md"] == edited  # type: ignore[index]
    assert second != first
    assert "has the digest" in refused("pull", REPO, "--sha256", digest, code=1)
    assert same_files(other, pull(REPO), *NAMES)
    assert same_files(artifact, pull(first, "--sha256", digest), *NAMES)
    assert "is there with other content" in refused("pull", REPO, "--out", "runs/tiny/commvq-2")


def test_a_context_has_a_card_and_is_continued(tiny: Any, hub: Hub) -> None:
    compressed("--method", "fp16")
    place, digest = push("c.safetensors", "me/book", "--public")
    assert hub.private == {"me/book": False}
    card = hub.found("me/book", "main")[1]["README.md"].decode()  # type: ignore[index]
    assert card.startswith("---\nlibrary_name: kvcli\ntags: [kv-cache, context]\n---\n")
    says(card, "```bash\nkvcli pull me/book\nkvcli inspect c.safetensors\n```\n")
    assert pull(place, "--sha256", digest, "--out", "got") == Path("got/c.safetensors")
    assert same_files(Path(), Path("got"), "c.safetensors")
    generated = result("generate", "--context", "got/c.safetensors", "--prompt", " and", *SHORT)
    assert generated["reused_tokens"] == len(TEXT)
    assert "is there with other content" in refused("pull", place, "--out", _with_another("there/c.safetensors"))


def test_a_recipe_has_a_card_with_its_loss_and_is_followed(tiny: Any, hub: Hub) -> None:
    settings = {"k_bits": [4, 2, 1], "v_bits": 2, "group_size": 8, "residual_length": 8, "sink_length": 2}
    measured = {"kl_mean": 0.0393, "kl_low": 0.0326, "corpus": "builtin:docs"}
    recipe = Recipe(model="org/tiny", fingerprint=tiny.fingerprint, method="kivi", settings=settings, measured=measured)
    recipe.save(Path("r.yaml"))
    place, digest = push("r.yaml", "me/recipe")
    card = hub.found("me/recipe", "main")[1]["README.md"].decode()  # type: ignore[index]
    assert card.startswith("---\nlibrary_name: kvcli\nbase_model: org/tiny\ntags: [kv-cache, recipe]\n---\n")
    says(card, "| measured | commit | not recorded |", "|  | kl_mean | 0.0393 |", "| k_bits | █▃▁ | 2.333 | 1 | 4 |")
    says(card, "```bash\nkvcli pull me/recipe\nkvcli generate --recipe r.yaml\n```\n")
    done = result("pull", place, "--sha256", digest, "--out", "got")
    assert "next: kvcli generate --recipe got/r.yaml" in done.stderr
    assert Recipe.read("got/r.yaml") == recipe
    generated = result("generate", "tiny", "--prompt", TEXT, "--recipe", "got/r.yaml", *SHORT)
    assert generated["memory"]["num_encoded"] > 0


def _with_another(path: str) -> str:
    Path(path).parent.mkdir()
    Path(path).write_text("mine")
    return str(Path(path).parent)


def test_folders_and_urls_work_as_well(artifact: Path, hub: Hub) -> None:
    Path("shared").mkdir()
    (Path("shared") / "README.md").write_text("mine")
    place, digest = push(artifact, "shared")
    assert (place, (Path("shared") / "README.md").read_text()) == ("shared", "mine")
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd="shared", check=True)
    push(artifact)
    for place in ("shared", f"{constants.ENDPOINT}/{REPO}/resolve/main"):
        assert same_files(artifact, pull(place, "--sha256", digest, "--out", f"from-{place[:4]}"), *NAMES)
    assert "404" in refused("pull", f"{constants.ENDPOINT}/{REPO}/nowhere", code=1)
    assert pull("shared") == Path("runs/tiny/commvq-2")  # whatever the folder is called


def shared_list(text: str) -> None:
    """Files of this folder listed in `shared`, with their checksums: those that the text names."""
    Path("shared").mkdir(exist_ok=True)
    lines = []
    for name in text.split(","):
        shutil.copy(name, "shared")
        lines.append(f"{hashlib.sha256(Path(name).read_bytes()).hexdigest()}  {name}\n")
    Path("shared/SHA256SUMS").write_text("".join(lines))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("notes.py", "holds no records"),
        ("context.py", "no name for context"),
        ("c.safetensors,notes.py", "lists 2 files"),
        ("codec.safetensors,kvcli.json,notes.py", "lists 3 files"),
    ],
)
def test_nothing_else_than_what_kvcli_shares_is_written(artifact: Path, names: str, says: str) -> None:
    for name in NAMES:
        shutil.copy(artifact / name, name)
    Path("notes.py").write_text("A note.\n")
    compressed("--method", "fp16")
    shutil.copy("c.safetensors", "context.py")
    shared_list(names)
    assert says in result("pull", "shared", "--out", "o", exit_code=2 if "," not in names else 1).stderr
    assert not Path("o").exists()


def test_a_server_is_believed_no_length_and_not_waited_for(hub: Hub, artifact: Path, monkeypatch: Any) -> None:
    place, _ = push(artifact)
    url, files = f"{constants.ENDPOINT}/{REPO}/resolve/main", hub.found(REPO, "main")[1]  # type: ignore[index]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=len(files["kvcli.json"]) - 1))
    for source in (url, place):
        assert "at most are taken here" in refused("pull", source, "--out", "o", code=1)
    files["SHA256SUMS"] *= 40
    for source in (url, place):
        assert "4096 at most" in refused("pull", source, "--out", "o", code=1)
    monkeypatch.setattr(share, "_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert "timed out" in refused("pull", f"http://127.0.0.1:{port}", "--out", "o", code=1)
    assert not Path("o").exists()


def test_a_place_of_one_push_takes_no_other_files(artifact: Path, tiny: Any, hub: Hub) -> None:
    Path("shared").mkdir()
    compressed("--method", "fp16")
    for place in ("shared", REPO):
        push("c.safetensors", place)
        assert "c.safetensors was pushed there" in refused("push", str(artifact), place)
        push("c.safetensors", place)


@pytest.mark.parametrize("damage", ["a byte", "the list", "a name", "no list"])
def test_what_is_damaged_is_not_used(artifact: Path, damage: str) -> None:
    """Fault (files): shared files damaged, or their list. Result: `pull` refuses before anything is written."""
    Path("shared").mkdir()
    push(artifact, "shared")
    weights, sums = Path("shared/codec.safetensors"), Path("shared/SHA256SUMS")
    if damage == "a byte":
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    elif damage == "no list":
        sums.unlink()
    else:
        shutil.copy(weights, "codec.safetensors")
        text = sums.read_text()
        sums.write_text(text[1:] if damage == "the list" else text.replace("  codec", "  ../codec"))
    said = refused("pull", "shared", "--out", "o", code=1)
    assert ("damaged" if damage != "no list" else "No such file") in said
    assert "hf cache" not in said  # no copy of the hub
    assert not Path("o").exists()


def test_what_cannot_be_shared_or_found_is_told(artifact: Path, hub: Hub, recorded: Any) -> None:
    for path in ("recorded", "missing"):
        refused("push", path, REPO)
    Path("c.safetensors").write_bytes(b"12345678{")
    refused("push", "c.safetensors", REPO, code=1)
    assert not hub.commits
    refused("push", str(artifact))
    assert "me/none is no folder here, and on the hub: " in refused("pull", "me/none", code=1)
    push(artifact)
    assert "Revision Not Found" in refused("pull", f"{REPO}@{'1' * 40}", code=1)
    for place in ("a/b/c", "/no/folder", "./none", "none"):
        assert f"there is no folder '{place}'" in refused("push", str(artifact), place)
        assert f"there is no folder '{place}'" in refused("pull", place)
    hub.commits["me/empty"] = {"0" * 40: {}}
    assert "SHA256SUMS" in refused("pull", "me/empty", code=1)


def test_front_matter_names_models_of_the_hub_only() -> None:
    assert "base_model: org/model\n" in front_matter("org/model", "x")
    assert [x for x in ("smollm2-135m", "./model", "/data/model", "a/b/c") if "base" in front_matter(x, "x")] == []


def test_cards_of_the_package_can_be_renewed(repo_root: Path) -> None:
    assert [is_edited(card) for card in (repo_root / "kvcli" / "fitted").glob("*/*/README.md")] == [False, False]
