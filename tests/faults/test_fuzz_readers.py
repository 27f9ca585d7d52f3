"""Readers of recordings, runs and artifacts get thousands of damaged files: they work or raise errors of kvcli."""

import copy
import json
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from folders import ODD_VALUES, SIZES, make

from kvcli.artifact.artifact import Artifact
from kvcli.artifact.fit import FitManifest, assemble
from kvcli.calibrate.parts import SamplesManifest, part_name
from kvcli.calibrate.recording import Recording
from kvcli.errors import KvcliError
from kvcli.storage.atomic import file_record
from kvcli.storage.manifest import json_sha256

PART = part_name(0, 1)


def read_samples(folder: Path) -> None:
    recording = Recording(folder / "samples")
    for layer_idx in (0, 2):
        samples = recording.load(layer_idx)
        samples.keys.whole(), samples.values.whole()


def read_parts(folder: Path) -> None:
    samples, names = folder / "samples", [part_name(0, part) for part in range(SIZES.num_parts)]
    SamplesManifest.read(samples / "samples.json").intact_parts(samples, names)


def read_artifact(folder: Path) -> None:
    artifact = Artifact.load(folder / "artifact")
    artifact.check_model(artifact.spec, (folder / "fingerprint").read_text())


def build_artifact(folder: Path) -> None:
    artifact = Artifact.load(folder / "artifact")
    artifact.build_codecs(artifact.config_with({"sink_length": 2}))


TARGETS: tuple[tuple[str, Callable[[Path], Any]], ...] = (
    ("samples/samples.json", read_samples),
    (f"samples/{PART}", read_samples),
    ("samples/samples.parts.jsonl", read_parts),
    ("run/run.json", lambda folder: assemble([folder / "run"])),
    # as a resumed fit reads it
    ("run/run.json", lambda folder: FitManifest.open(folder / "run", FitManifest.read(folder / "run.json").values)),
    ("run/layer-001.json", lambda folder: assemble([folder / "run"])),
    ("run/layer-001.safetensors", lambda folder: assemble([folder / "run"])),
    ("artifact/kvcli.json", read_artifact),
    ("artifact/kvcli.json", build_artifact),
    ("artifact/codec.safetensors", build_artifact),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording, a run and an artifact, and the log that the recording had before it was finished."""
    folder = tmp_path_factory.mktemp("fuzz")
    make(folder)
    (folder / "fingerprint").write_text(Artifact.load(folder / "artifact").metadata["fingerprint"])
    (folder / "run.json").write_bytes((folder / "run" / "run.json").read_bytes())
    parts = json.loads((folder / "samples" / "samples.json").read_text())["parts"]
    lines = [json.dumps({"part": name, **record}) for name, record in parts.items()]
    (folder / "samples" / "samples.parts.jsonl").write_text("\n".join(lines))
    return folder


def damaged_bytes(data: bytes, chance: random.Random) -> bytes:
    """Bytes with one or more bits, slices or the end changed; headers are hit more often than data."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        at = min(int(chance.random() ** chance.choice((1, 4)) * len(changed)), max(0, len(changed) - 1))
        match chance.randrange(7):
            case 0 if changed:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = chance.randbytes(chance.choice((1, 8, 100)))
            case 3:
                del changed[at : at + chance.choice((1, 8, 100))]
            case 4:
                changed[at : at + 8] = chance.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
            case 5:
                changed[at:at] = changed[at // 2 : at // 2 + 50]
            case 6 if chance.random() < 0.1:
                changed[at:at] = chance.choice((b"[", b'{"a":', b"1")) * chance.choice((100, 100_000))
    return bytes(changed)


def damaged_json(text: bytes, chance: random.Random) -> bytes:
    """A JSON object with a few fields replaced, removed or added, at any depth, mostly with a checksum that agrees."""
    values = json.loads(text)
    values.pop("sha256", None)
    for _ in range(chance.choice((1, 1, 1, 3))):
        place: Any = values
        while keys := list(place) if isinstance(place, dict) else list(range(len(place))):
            key = chance.choice(keys)
            if isinstance(place[key], (dict, list)) and place[key] and chance.random() < 0.7:
                place = place[key]
                continue
            match chance.randrange(4):
                case 0:
                    del place[key]
                case 1 if isinstance(place, dict):
                    place[f"{key}x"] = place.pop(key)
                case _:
                    of_file = values.get(chance.choice(list(values) or [""]))
                    place[key] = copy.deepcopy(chance.choice((*ODD_VALUES, of_file)))
            break
    sealed = values if chance.random() < 0.1 else {**values, "sha256": json_sha256(values)}
    return json.dumps(sealed).encode()


def agree(folder: Path, name: str) -> tuple[Path, bytes]:
    """Gives a damaged file of tensors the checksum that its manifest names; returns the manifest and what it was."""
    place = name.partition("/")[0]
    path = folder / place / {"samples": "samples.json", "run": "layer-001.json", "artifact": "kvcli.json"}[place]
    before, record = path.read_bytes(), file_record(folder / name)
    values = json.loads(before)
    del values["sha256"]
    if place == "run":
        values["tensors"] = record
    else:
        values["parts" if place == "samples" else "files"][Path(name).name] = record
    path.write_text(json.dumps({**values, "sha256": json_sha256(values)}))
    return path, before


def fuzz(folder: Path, count: int, seed: int) -> None:
    chance = random.Random(seed)
    memory, refused, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, 0.0
    for index in range(count):
        name, read = TARGETS[index % len(TARGETS)]
        path = folder / name
        before, restore = path.read_bytes(), []
        as_json = path.suffix == ".json" and chance.random() < 0.7
        path.write_bytes((damaged_json if as_json else damaged_bytes)(before, chance))
        if path.suffix == ".safetensors" and chance.random() < 0.8:
            restore.append(agree(folder, name))
        started = time.process_time()
        try:
            read(folder)
        except KvcliError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{name}, mutation {index} of seed {seed}: {error!r}") from error
        slowest = max(slowest, time.process_time() - started)
        for changed, content in ((path, before), *restore):
            changed.write_bytes(content)
    assert refused > count // 2
    assert slowest < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500 * 2**10  # KiB


@pytest.mark.parametrize(("name", "read"), TARGETS)
def test_what_is_not_damaged_is_read(folder: Path, name: str, read: Callable[[Path], None]) -> None:
    """Otherwise a target would be refused whatever its mutation is, and its mutations would test nothing."""
    read(folder)


def test_damaged_files_are_refused_with_errors_of_kvcli(folder: Path) -> None:
    fuzz(folder, 1000, seed=1)


@pytest.mark.slow
def test_ten_thousand_damaged_files(folder: Path) -> None:
    """Fault (files): any of 10,000 random mutations of all of these files. Result: the file is read or an error of
    kvcli is raised, within 5 s and 500 MiB; 1,000 by default.
    """
    fuzz(folder, 9000, seed=2)
