"""What is known of an artifact, a recording, a stored context, a recipe or records, as plain JSON values.

Nothing is computed that needs the model, and nothing is guessed: what was not recorded is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvcli.artifact.recipe import Recipe, artifact_sha256
from kvcli.errors import UsageError
from kvcli.registry import get_method, method_name
from kvcli.spec import ModelSpec

if TYPE_CHECKING:
    from kvcli.artifact.artifact import Artifact
    from kvcli.models.load import LoadedModel

INDEX = "index.sqlite"
CONTEXT = 32768
"""Tokens of a cache whose bits are told with window and positions, and whose other layers' bytes are recorded."""

BARS = "▁▂▃▄▅▆▇█"


def describe(path: Path) -> dict[str, Any]:
    """Kind and facts of what lies at a path; a context of a store is at STORE/NAME.

    UsageError: nothing is there, or something that is none of these; KvcliError: it is damaged or of another version.
    """
    if (path / "kvcli.json").exists():
        from kvcli.artifact.artifact import Artifact  # imports torch

        return {"kind": "artifact", "path": str(path), **of_artifact(Artifact.load(path))}
    if (path / "samples.json").exists():
        return {"kind": "recording", "path": str(path), **_recording(path)}
    if (path.parent / INDEX).exists() and not path.exists():
        from kvcli.contexts.reader import ContextReader

        return {"kind": "context", "path": str(path), **of_context(ContextReader(path.parent).get(path.name).record)}
    if (path / "run.json").exists():
        raise UsageError(f"{path} is a run of kvcli fit; 'kvcli export {path}' makes the artifact")
    if (path / INDEX).exists():
        raise UsageError(f"{path} is a store: name one of its contexts, {path}/NAME, or 'kvcli contexts list --store'")
    if not path.is_file():
        what = "is neither an artifact nor a recording" if path.exists() else "does not exist"
        raise UsageError(f"{path} {what}; name an artifact, a recording, a context, a recipe or records")
    if path.suffix in (".yaml", ".yml"):
        return {"kind": "recipe", "path": str(path), **_recipe(path)}
    with path.open("rb") as file:
        start = file.read(9)
    if start[8:] == b"{" and start[:1] != b"{":
        from kvcli.cache.context import read_header

        return {"kind": "context", "path": str(path), **of_context(read_header(path)[1])}
    try:
        return {"kind": "records", "path": str(path), **_records(path)}
    except UsageError as error:
        raise UsageError(f"{error}, and is no artifact, recording, context or recipe (.yaml)") from error


def of_artifact(artifact: Artifact) -> dict[str, Any]:
    """Facts of an artifact."""
    import torch

    from kvcli.artifact.metadata import metric_values
    from kvcli.plan.cache import CachePlan

    metadata, method, config = artifact.metadata, get_method(artifact.method), artifact.config
    others, codecs = _other_bytes(metadata["provenance"]), artifact.build_codecs(config)
    whole = None if others is None else lambda tokens: others
    plan = CachePlan.of_codecs(artifact.spec, method, config, codecs, torch.float16, other_bytes=whole)
    by_layer, parts, books = plan.layer_bits(), Counter[str](), Counter[str]()
    for name, x in artifact.tensors.items():
        parts[buffer := name.split(".", 2)[2]] += x.nbytes
        if buffer.endswith("codebook"):
            books[f"rows of {buffer}"] += x.numel() // x.shape[-1]
    dead = {
        label: metric_values(metadata["layers"], name) for name, label in method.fit_metrics.items() if "dead" in name
    }
    if books:
        books.update({label: int(sum(x for x, _ in values)) for label, values in dead.items() if values})
    keys, values = (fmean(bits) for bits in zip(*by_layer, strict=True))
    memory = plan.memory(CONTEXT)
    return {
        "method": method_name(artifact.method, metadata["config"]),
        "compressed": plan.coverage(CONTEXT),
        "bits": {
            **{"keys": keys, "values": values, "mean": (keys + values) / 2, "nominal": list(memory.nominal_bits)},
            f"all of {CONTEXT} tokens": memory.effective_bits,
        },
        "bytes": {**parts, "all": artifact.nbytes, "state of a sequence": sum(x.state for x in plan.layers)},
        **({"codebooks": {**books, "how often each row is used": "not recorded"}} if books else {}),
        "provenance": {
            **{x: metadata[x] for x in ("model", "fingerprint", "kvcli_version")},
            **{"commit": "not recorded", **metadata["provenance"]},
        },
        "settings": metadata["config"],
        "layers": {
            "stored bits per key": [key for key, _ in by_layer],
            "stored bits per value": [value for _, value in by_layer],
            **{label: [x.get(name) for x in metadata["layers"]] for name, label in method.fit_metrics.items()},
        },
        "warnings": [
            f"layer {i}: {x}" for i, layer in enumerate(metadata["layers"]) for x in layer.get("warnings", ())
        ],
    }


def _recording(folder: Path) -> dict[str, Any]:
    """Facts of a recording, or of a shard, finished or not; its files are not read."""
    from kvcli.calibrate.parts import FISHER, SamplesManifest, part_records

    manifest = SamplesManifest.read(folder / SamplesManifest.FILE)
    files = {**manifest.parts, **part_records(folder)}
    spec, queries = manifest.spec, manifest.query_sequences * manifest.seq_len
    return {
        "state": "finished" if manifest.complete else "not finished: the same 'kvcli calibrate' goes on",
        "recorded": full_attention(spec, manifest.provenance),
        "shard": None if manifest.shard is None else "/".join(map(str, manifest.shard)),
        "tokens": {
            **{"keys and values": manifest.num_tokens, "queries": queries},
            **{"sequences": manifest.num_sequences, "sequences with gradients": manifest.fisher_sequences},
        },
        "bytes": {
            "keys and values, 16 bits": spec.fp16_bytes_per_token() * manifest.num_tokens,
            "queries, 16 bits": 2 * spec.num_layers * spec.num_heads * spec.head_dim * queries,
            "Fisher information": files.get(FISHER, {}).get("bytes", 0),
            "files so far": sum(record["bytes"] for record in files.values()),
        },
        "provenance": {"model": manifest.model, "fingerprint": manifest.fingerprint, **manifest.provenance},
        "shapes": spec.to_dict(),
    }


def of_context(record: Any) -> dict[str, Any]:
    """Facts of a `ContextRecord`."""
    identity, (key_bits, value_bits) = record.identity, record.bits
    known = {"model", "fingerprint", "weights", "dtype", "tokenizer", "chat_template", "reading"}
    return {
        "method": record.method,
        "tokens": record.num_tokens,
        "coded tokens": record.counts.attended[0],
        "bits": {
            **{"keys": key_bits, "values": value_bits, "mean": (key_bits + value_bits) / 2},
            "all of it": 16 * record.nbytes / record.fp16_bytes,
        },
        "bytes": {
            **record.bytes_of,
            **{"token ids and headers": record.nbytes - sum(record.bytes_of.values()), "all": record.nbytes},
            "in fp16": record.fp16_bytes,
        },
        "provenance": {
            **{"source": str(record.notes.get("source", "")), "kvcli_version": record.kvcli_version},
            **{name: x for name, x in identity.items() if name in known},
            "codecs": identity.get("codecs", {}).get("fitted", "as the settings make them"),
        },
        "settings": identity.get("config"),
    }


def _recipe(path: Path) -> dict[str, Any]:
    """Facts of a recipe, and whether the folder that it names holds its artifact."""
    recipe, method, fitted = Recipe.read(path), "", {}
    if recipe.artifact_sha256 is None:
        method = method_name(recipe.method, recipe.settings)
    else:
        here = recipe.artifact is not None and artifact_sha256(recipe.artifact) == recipe.artifact_sha256
        fitted = {"artifact": {"folder": recipe.artifact, "sha256": recipe.artifact_sha256, "is there": here}}
    return {
        "method": method or recipe.method,
        "measured": {"commit": "not recorded", **recipe.measured},
        **fitted,
        "provenance": {x: getattr(recipe, x) for x in ("model", "fingerprint", "kvcli_version")},
        "settings": recipe.settings,
    }


def _records(path: Path) -> dict[str, Any]:
    """Facts of records: their tables, with what `kvcli report` says of them."""
    from kvcli.report.tables import read, sections

    lost = list[str]()
    return {
        "sections": [
            {
                **{"title": x.title, "about": x.about, "notes": list(x.notes), "commands": list(x.commands)},
                "rows": [dict(zip(x.table.columns, row, strict=True)) for row in x.table.rows],
            }
            for x in sections(read(path, lost.append))
        ],
        "warnings": lost,
    }


def full_attention(spec: ModelSpec, provenance: Mapping[str, Any]) -> str:
    """Which layers can be compressed, and, where others were recorded, how much of an uncompressed cache is theirs."""
    others, theirs = _other_bytes(provenance), CONTEXT * spec.fp16_bytes_per_token()
    text = f"{spec.coverage}, those that attend to the whole context"
    of = f"of an uncompressed cache of {CONTEXT} tokens"
    return text if others is None else f"{text}, with {100 * theirs / (theirs + others):.0f} % {of}"


def other_layers(loaded: LoadedModel) -> dict[str, Any]:
    """What calibration records of layers that are not compressed: bytes of `CONTEXT` tokens in 16 bits, where known."""
    from kvcli.plan.memory import other_bytes_of

    others = other_bytes_of(loaded)
    return {} if others is None else {"other_layers": {"tokens": CONTEXT, "bytes": others(CONTEXT)}}


def _other_bytes(provenance: Mapping[str, Any]) -> int | None:
    """What `other_layers` recorded; None: it is not known."""
    record = provenance.get("other_layers")
    found = record.get("bytes") if isinstance(record, dict) and record.get("tokens") == CONTEXT else None
    return found if type(found) is int and found >= 0 else None


def sparkline(values: list[float]) -> str:
    """A bar of eight heights per number, from the least to the greatest."""
    least, most = min(values), max(values)
    return "".join(BARS[round(7 * (x - least) / (most - least)) if most > least else 0] for x in values)
