"""The text that ships with kvcli: its domains, their splits, and the mixture that is the default."""

import hashlib
import json
from collections.abc import Iterable
from itertools import islice

import pytest

from kvcli.calibrate.builtin_text import MIXTURE, builtin_folder, domains, mixture
from kvcli.calibrate.corpus import CorpusConfig, documents
from kvcli.errors import CorpusError

UNSEEN = {"essays", "cpp", "french", "japanese"}


def texts(source: str, split: str = "calibration") -> list[str]:
    return list(documents(CorpusConfig(source, split)))


def all_texts(split: str, names: Iterable[str]) -> list[str]:
    return [text for name in names for text in texts(f"builtin:{name}", split)]


def test_every_domain_can_be_read_by_name() -> None:
    assert set(domains("calibration")) == set(MIXTURE)
    assert set(domains()) == set(MIXTURE) | UNSEEN
    for name, sources in domains().items():
        assert (found := set(texts(f"builtin:{name}", "heldout")))
        assert found == set(all_texts("heldout", sources))


@pytest.mark.parametrize(
    ("source", "split", "message"),
    [
        ("builtin:essay", "heldout", "no built-in text 'essay'; did you mean 'essays'"),
        ("builtin:", "heldout", "no built-in text ''"),
        ("builtin:code", "train", "has no split 'train'; it has calibration and heldout"),
        ("builtin", "train", "has no split 'train'"),
    ],
)
def test_names_and_splits_that_do_not_exist(source: str, split: str, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        texts(source, split)


@pytest.mark.parametrize(("split", "expected"), [("calibration", "536fbe8c037c85ab"), ("heldout", "7ada4248e3b67461")])
def test_the_text_that_published_figures_were_measured_on_stays_as_it_was(split: str, expected: str) -> None:
    whole = "\0".join(texts("builtin:docs", split))
    assert hashlib.sha256(whole.encode()).hexdigest()[:16] == expected


def test_the_mixture_depends_on_the_seed_alone_and_has_all_of_the_text() -> None:
    first = list(mixture("heldout", 1))
    assert first == list(mixture("heldout", 1))
    assert first[:20] != list(islice(mixture("heldout", 2), 20))
    whole = sum(map(len, all_texts("heldout", MIXTURE)))
    assert sum(len(record["text"]) for record in first) == pytest.approx(whole, rel=0.001)
    assert len({record["text"] for record in first}) == len(first)


@pytest.mark.parametrize("characters", [60_000, 300_000])
def test_every_beginning_of_the_mixture_has_the_same_shares(characters: int) -> None:
    taken = dict.fromkeys(MIXTURE, 0)
    for record in mixture("calibration", 0):
        taken[record["domain"]] += len(record["text"])
        if sum(taken.values()) > characters:
            break
    for name, share in MIXTURE.items():
        assert taken[name] / sum(taken.values()) == pytest.approx(share / sum(MIXTURE.values()), abs=3000 / characters)


def test_the_mixture_reads_a_domain_from_many_documents_first() -> None:
    first = [r["text"] for r in islice(mixture("calibration", 0), 200) if r["domain"] == "docs"]
    whole = texts("builtin:docs")
    assert len(first) > 20
    assert len({next(i for i, text in enumerate(whole) if part in text) for part in first}) == len(first)


def test_no_run_of_200_characters_is_in_both_splits() -> None:
    calibration = "\0".join(all_texts("calibration", MIXTURE))
    # a run of 200 characters covers an aligned block of 100 wherever it begins
    blocks = {calibration[i : i + 100] for i in range(0, len(calibration), 100)}
    for text in all_texts("heldout", domains()):
        for at in (i for i in range(len(text) - 99) if text[i : i + 100] in blocks):
            starts = range(max(0, at - 100), min(at, len(text) - 200) + 1)
            assert not any(text[i : i + 200] in calibration for i in starts), text[at:][:100]


def test_the_manifest_is_true_and_sources_name_their_domain_package_and_licence() -> None:
    folder = builtin_folder()
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["files"]:
        data = (folder / entry["path"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"]
        assert (len(data), data.count(b"\n")) == (entry["bytes"], entry["documents"])
    assert {folder / entry["path"] for entry in manifest["files"]} == set(folder.rglob("*.jsonl"))
    assert len({source["name"] for source in manifest["sources"]}) == len(manifest["sources"])
    for source in manifest["sources"]:
        assert source["domain"]
        assert source["license"]
        assert "package" in source["url_or_package"] or source["authors"] == "generated"
        assert len((folder / source["license_file"]).read_text()) > 100
        splits = {entry["split"] for entry in manifest["files"] if entry["path"].endswith(f"/{source['name']}.jsonl")}
        assert splits == ({"heldout"} if source.get("heldout_only") else {"calibration", "heldout"})
