"""The metadata of an artifact, kvcli.json, with the names of the folder's files, and its model card."""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from kvcli._version import __version__
from kvcli.commands.paths import model_folder
from kvcli.errors import ArtifactError, UsageError
from kvcli.methods.config import CacheConfig
from kvcli.progress import Say, say_nothing
from kvcli.registry import get_method, method_name
from kvcli.spec import ModelSpec
from kvcli.storage.manifest import Sealed

METADATA = "kvcli.json"
WEIGHTS = "codec.safetensors"
PREVIOUS = f"{WEIGHTS}.previous"
"""Second name of the weights that kvcli.json names, while their successor is written."""


class Metadata(Sealed):
    """The content of kvcli.json."""

    VERSION = 6
    ERROR = ArtifactError
    MISSING = f"no artifact in {{folder}}: {METADATA} is missing; make one with 'kvcli export'"
    REMEDY = "export it again with 'kvcli export --overwrite'"

    method: str
    config: dict[str, Any]
    model: str
    fingerprint: str
    spec: ModelSpec
    provenance: dict[str, Any]
    layers: list[dict[str, Any]]
    files: dict[str, dict[str, Any]]

    @model_validator(mode="after")
    def _agrees_with_its_method(self) -> Self:
        try:
            get_method(self.method).config_cls(**self.config).resolve(self.spec)
        except (UsageError, TypeError, OverflowError) as error:
            raise ValueError(str(error)) from error
        if len(self.layers) != self.spec.num_layers:
            raise ValueError(f"layers are not the reports of {self.spec.num_layers} layers")
        if WEIGHTS not in self.files:
            raise ValueError(f"files has no checksum of {WEIGHTS}")
        return self


def new_metadata(
    *,
    method: str,
    config: CacheConfig,
    identity: Mapping[str, Any],
    provenance: Mapping[str, Any],
    layers: list[Mapping[str, Any]],
) -> dict[str, Any]:
    """The metadata of an artifact as plain JSON values, without `files`, which `save` adds.

    Args:
        method: name of the method.
        config: its settings, resolved.
        identity: of the model, as `LoadedModel.identity` gives it.
        provenance: corpus, revision, tokens, seed.
        layers: what fitting reported for each layer, held-out errors above all.
    """
    return {
        "format_version": Metadata.VERSION,
        "kvcli_version": __version__,
        "method": method,
        "config": config.model_dump(),
        **identity,
        "provenance": dict(provenance),
        "layers": layers,
    }


def metric_values(reports: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, str]]:
    """A metric of all layers, each value with its place, such as `layer 3 head 1`.

    Args:
        reports: `FitReport.metrics` of each layer, and optionally the index `layer`.
        name: of the metric: a number per layer, or a list with one per head or one for all heads.
    """
    placed = []
    for position, report in enumerate(reports):
        values, where = report.get(name, []), f"layer {report.get('layer', position)}"
        per_head = values if isinstance(values, Sequence) else [values]
        placed += [
            (float(value), f"{where} head {head}" if len(per_head) > 1 else where)
            for head, value in enumerate(per_head)
            if isinstance(value, (int, float))
        ]
    return placed


def front_matter(model: str, *tags: str) -> str:
    """The YAML that a model card begins with; the hub refuses a base model that is none of its names."""
    base = f"base_model: {model}\n" if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model) else ""
    return f"---\nlibrary_name: kvcli\n{base}tags: [{', '.join(('kv-cache', *tags))}]\n---"


def with_checksum(text: str) -> str:
    """A model card with its checksum, by which kvcli knows a card of its own that nobody edited."""
    return f"{text}<!-- written by kvcli: {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def is_edited(card: Path, say: Say = say_nothing) -> bool:
    """Whether there is a model card that kvcli did not write so; says that it stays."""
    text = card.read_text(errors="replace") if card.is_file() else None
    if found := text is not None and text != with_checksum(text.rpartition("<!-- ")[0]):
        say(f"{card}, which was edited, stays; without it one is made")
    return found


def model_card(metadata: Mapping[str, Any], about: Mapping[str, Any], place: str = "OWNER/NAME", loss: str = "") -> str:
    """The README.md, with its checksum, of an artifact that is pulled from a place; `loss` is what is known of it.

    Without `about`, which `kvcli.report.facts.of_artifact` gives, true bits and the whole cache are not told.
    """
    config, provenance, method = metadata["config"], metadata["provenance"], get_method(metadata["method"])
    spec = ModelSpec.from_dict(metadata["spec"])
    key_bits, value_bits = method.nominal_bits(spec, method.config_cls(**config))
    bits, name = about.get("bits"), method_name(metadata["method"], config)
    use = ["kvcli", "generate", metadata["model"], "--artifact", str(model_folder(metadata["model"], name))]
    known = f"| true bits per value | keys {bits['keys']:.2f}, values {bits['values']:.2f} |\n" if bits else ""
    known += f"| loss | {loss} |\n" if loss else ""
    measured = "".join(
        f"| {label} (mean) | {sum(value for value, _ in values) / len(values):.4g} |\n"
        for name, label in method.fit_metrics.items()
        if (values := metric_values(metadata["layers"], name))
    )
    doubtful = [i for i, layer in enumerate(metadata["layers"]) if layer.get("warnings")]
    if doubtful:
        measured += f"| layers with warnings of the fit, which {METADATA} lists | {', '.join(map(str, doubtful))} |\n"
    plain = {setting: value for setting, value in config.items() if not isinstance(value, list | tuple)}
    corpus = provenance.get("corpus", {})
    origin = f"{corpus.get('source', '?')}" + (f" at {corpus['revision']}" if corpus.get("revision") else "")
    return with_checksum(f"""{front_matter(metadata["model"], "quantization", metadata["method"])}
# {name} KV cache codec for {metadata["model"]}

Made by kvcli {metadata["kvcli_version"]}. It holds codebooks and encoders, no model weights; it works with this model
only (shapes and a sample of its weights are compared when the artifact is attached).

```bash
{shlex.join(["kvcli", "pull", place])}
{shlex.join([*use, "--prompt", "The water cycle is"])}
```

| | |
|---|---|
| compressed | {about.get("compressed", spec.coverage)} |
{known}| size of {WEIGHTS} | {metadata["files"][WEIGHTS]["bytes"]:,} bytes |
| nominal bits per value | keys {key_bits:.2f}, values {value_bits:.2f} |
| calibration text | {origin} |
| tokens | {provenance.get("num_tokens", "?")} |
| seed | {provenance.get("seed", "?")} |
{measured}| settings; those of layers: {METADATA} | `{json.dumps(plain)}` |
""")
