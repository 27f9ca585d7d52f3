"""What an engine loses whose tier gives chunks back, beside a session: `python -m research.restored klt-2.25 kivi-2`.

SmolLM2 in float32; of each sequence the first three quarters are chunks that were codes, as in a tier, or were read by
a session with 4 sinks and 32 recent tokens; KL of the rest, which is read in one pass, against 16 bits throughout.
An engine computes what follows the last whole chunk, on average half a chunk: `--after` tokens, which do not count.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvcli
from kvcli.cli.output import Output
from kvcli.eval.suite import CorpusOptions
from kvcli.integrations.chunks.codec import ChunkCodec
from kvcli.integrations.chunks.format import ChunkLayout
from kvcli.integrations.chunks.served import ChunkSettings, Served
from kvcli.models.builtin_models import BUILTIN_MODELS, fetch_builtin
from kvcli.seam.versions import with_cache

MODEL = "smollm2-135m"


def kl(logits: Tensor, reference: Tensor) -> float:
    """Nats per token, of logits [batch, tokens, vocabulary]."""
    log, true = (x.float().log_softmax(-1) for x in (logits, reference))
    return float((true.exp() * (true - log)).sum(-1).mean())


def restored(cache: DynamicCache, codec: ChunkCodec, chunk: int) -> tuple[DynamicCache, float]:
    """A copy of a cache of one sequence whose chunks were codes, and bits per number."""
    out, (layers, keys) = DynamicCache(), (len(cache.layers), cache.layers[0].keys)
    layout = ChunkLayout(layers, chunk, keys.shape[1], keys.shape[3], keys.dtype)
    count = keys.shape[2] // chunk

    def layer(layer_idx: int) -> tuple[Tensor, Tensor]:
        x = cache.layers[layer_idx]
        return tuple(torch.cat(part.split(chunk, dim=2)) for part in (x.keys, x.values))  # type: ignore[return-value]

    stored = codec.encode(layout, layer, [i * chunk for i in range(count)]).stored
    for layer_idx, pair in enumerate(codec.decode(list(stored), layout)):
        out.update(*(torch.cat(x.split(1), dim=2) for x in pair), layer_idx)
    return out, 8 * stored.numel() / (2 * layers * keys[:, :, : count * chunk].numel())


@torch.inference_mode()
def main() -> None:
    """Prints one line of JSON per method, text and length of a chunk."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="+", help="with artifact of the package, or without")
    parser.add_argument("--corpora", nargs="+", default=["builtin:essays", "builtin:docs"])
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--exact-tokens", type=int, nargs="+", default=[1])
    parser.add_argument("--after", type=int, nargs="+", default=[0, 256])
    parser.add_argument("--num-sequences", type=int, default=8)
    options = parser.parse_args()
    reporter = Output(as_json=True)
    folder = fetch_builtin(BUILTIN_MODELS[MODEL], reporter.say, reporter.progress)
    for corpus in options.corpora:
        suite = CorpusOptions(corpus=corpus, dtype="float32")
        loaded = suite.load(reporter)
        model: Any = loaded.model
        ids = suite.sequences(loaded, options.num_sequences, 2048, reporter)
        for method in options.methods:
            fitted = Path(kvcli.__file__).parent / "fitted" / MODEL / method
            coding = {"artifact": str(fitted)} if fitted.exists() else {"method": method}
            for chunk in options.chunks:
                for exact in options.exact_tokens:
                    settings = ChunkSettings(model=str(folder), exact_tokens=exact, **coding)
                    codec = ChunkCodec(Served.load(settings))
                    of_tier, of_session = (dict.fromkeys(options.after, 0.0) for _ in range(2))
                    bits, sizes = 0.0, {"residual_length": 32, "sink_length": 4}
                    named: dict[str, Any] = {"artifact": fitted} if fitted.exists() else {}
                    for row in ids.split(1):
                        plain = DynamicCache()
                        model(row[:, :1536], logits_to_keep=1, **with_cache(plain))
                        back, bits = restored(plain, codec, chunk)
                        reference = model(row[:, 1536:], **with_cache(plain)).logits
                        ours = model(row[:, 1536:], **with_cache(back)).logits
                        for after in options.after:
                            of_tier[after] += kl(ours[:, after:], reference[:, after:]) / len(ids)
                            with kvcli.attach(model, method, **named, **sizes) as session:
                                cache = session.new_cache()
                                model(row[:, : 1536 + after], logits_to_keep=1, **with_cache(cache))
                                logits = model(row[:, 1536 + after :], **with_cache(cache)).logits
                            of_session[after] += kl(logits, reference[:, after:]) / len(ids)
                    row_of = {"method": method, "corpus": corpus, "chunk": chunk, "exact_tokens": exact, "bits": bits}
                    print(json.dumps({**row_of, "kl": of_tier, "session_kl": of_session}), flush=True)


if __name__ == "__main__":
    main()
