"""The model card of an artifact: its README.md, for people only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvcli.artifact.metadata import METADATA, metric_values
from kvcli.registry import get_method
from kvcli.spec import ModelSpec


def model_card(metadata: Mapping[str, Any]) -> str:
    """The README.md of an artifact."""
    config, provenance, method = metadata["config"], metadata["provenance"], get_method(metadata["method"])
    spec = ModelSpec.from_dict(metadata["spec"])
    key_bits, value_bits = method.nominal_bits(spec, method.config_cls(**config))
    measured = "".join(
        f"| {label} (mean) | {sum(value for value, _ in values) / len(values):.4g} |\n"
        for name, label in method.fit_metrics.items()
        if (values := metric_values(metadata["layers"], name))
    )
    doubtful = [i for i, layer in enumerate(metadata["layers"]) if layer.get("warnings")]
    if doubtful:
        measured += f"| layers with warnings of the fit, which {METADATA} lists | {', '.join(map(str, doubtful))} |\n"
    corpus = provenance.get("corpus", {})
    origin = f"{corpus.get('source', '?')}" + (f" at {corpus['revision']}" if corpus.get("revision") else "")
    return f"""---
library_name: kvcli
base_model: {metadata["model"]}
tags: [kv-cache, quantization, {metadata["method"]}]
---
# {metadata["method"]} KV cache codec for {metadata["model"]}

Made by kvcli {metadata["kvcli_version"]}. It holds codebooks and encoders, no model weights; it works with this model
only (shapes and a sample of its weights are compared when the artifact is attached).

```bash
kvcli generate {metadata["model"]} --method {metadata["method"]} --artifact . --prompt "The water cycle is"
```

| | |
|---|---|
| nominal bits per value | keys {key_bits:.2f}, values {value_bits:.2f} |
| calibration text | {origin} |
| tokens | {provenance.get("num_tokens", "?")} |
| seed | {provenance.get("seed", "?")} |
{measured}| settings | `{json.dumps(config)}` |
"""
