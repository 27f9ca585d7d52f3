"""Small things that tests make: random models, specifications, data with structure, recordings."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcli.calibrate.collect import collect
from kvcli.calibrate.config import CollectConfig
from kvcli.calibrate.recording import Recording
from kvcli.methods.commvq.config import CommVQConfig
from kvcli.methods.commvq.fit import coding_error, shares
from kvcli.methods.commvq.fit_keys import fit_keys, set_pair_weight
from kvcli.methods.commvq.keys import CommVQKeyCodec
from kvcli.methods.layer_codec import LayerCodec
from kvcli.methods.samples import LayerSamples
from kvcli.models.fingerprint import fingerprint
from kvcli.models.load import LoadedModel
from kvcli.registry import get_method
from kvcli.seam.probe import probe
from kvcli.spec import ModelSpec, RopeSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

CONFIG = CommVQConfig(bits=2, codebook_size=8, num_residuals=4, key_iterations=6, value_iterations=4)
"""Settings that fit a tiny model in a second."""

WINDOW = {"residual_length": 6, "sink_length": 2, "flush_block": 1}
"""A window so short that most tokens of a test become codes."""


def make_model(family: str, **changes: Any) -> Any:
    """A random causal language model with 4 query heads over 2 kv heads of 16 channels."""
    import transformers

    values = {
        **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512},
        **{"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
        **({"sliding_window": None} if family == "mistral" else {}),
        **changes,
    }
    torch.manual_seed(1)
    config = getattr(transformers, f"{family.title()}Config")(**values)
    model = getattr(transformers, f"{family.title()}ForCausalLM")(config).eval()
    # a padding token whose embedding is zero stays zero in every layer, and could hide in any statistic
    model.get_input_embeddings().weight.data[0].normal_()
    # random weights of the usual scale give nearly uniform attention; larger ones make every error visible
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.data *= 4
    return model


def make_spec(head_dim: int = 16, num_kv_heads: int = 2, rotary_dim: int | None = None) -> ModelSpec:
    rope = RopeSpec("default", 1e4, rotary_dim or head_dim)
    return ModelSpec("llama", 1, 64, max(4, num_kv_heads), num_kv_heads, head_dim, 512, 97, rope)


def clustered(problems: int, count: int, width: int, seed: int = 0) -> Tensor:
    """Data with structure that a codebook can learn."""
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(problems, 12, width, generator=generator)
    pick = torch.randint(0, 12, (problems, count), generator=generator)
    noise = torch.randn(problems, count, width, generator=generator)
    return centre.gather(1, pick.unsqueeze(-1).expand(-1, -1, width)) + 0.3 * noise


def fitted_keys(
    spec: ModelSpec, config: CommVQConfig, tokens: int = 3000, seed: int = 0
) -> tuple[CommVQKeyCodec, Tensor]:
    codec = CommVQKeyCodec(spec, config.resolve(spec))
    generator = torch.Generator().manual_seed(seed)
    keys = clustered(spec.num_kv_heads, tokens, spec.head_dim, seed)
    queries = torch.randn(spec.num_heads, 64, spec.head_dim, generator=generator)
    samples = LayerSamples(queries, keys, keys, torch.arange(tokens))
    with torch.no_grad():
        set_pair_weight(codec, samples.keys, samples, codec.config.key_weighting)
        fit_keys(codec, samples.keys, codec.config, torch.Generator().manual_seed(seed))
    return codec, keys


def fitted_layer(method_name: str, data: LayerSamples, **settings: object) -> tuple[LayerCodec, dict[str, Any]]:
    """A layer's codec and the figures of its fit, measured on the samples that it was fitted to."""
    method, spec = get_method(method_name), make_spec(data.q.shape[-1])
    config = method.config_cls(**settings)
    codec = method.build(spec, config, 0)
    assert method.fit is not None
    return codec, dict(method.fit(codec, data, data, config, torch.Generator()).metrics)


def load(model: Any) -> LoadedModel:
    spec = probe(model).spec
    return LoadedModel("tiny", model, None, spec, fingerprint(model, spec))  # type: ignore[arg-type]


def record(model: Any, folder: Path) -> Recording:
    sequences = torch.randint(3, 97, (16, 64), generator=torch.Generator().manual_seed(0))
    collect(load(model), sequences, CollectConfig(16, 64, 4, 4), folder, {"corpus": {"source": "random"}})
    return Recording(folder)


def prompt_and_steps(prompt: Any, *lengths: int) -> list[dict[str, torch.Tensor]]:
    """A prompt and three more tokens, one by one."""
    first = prompt(*lengths)
    pieces, mask = [first], first["attention_mask"]
    for token in (5, 6, 7):
        mask = torch.cat((mask, torch.ones(len(lengths), 1, dtype=torch.long)), dim=1)
        pieces.append({"input_ids": torch.full((len(lengths), 1), token), "attention_mask": mask})
    return pieces


def nmse(codec: Any, x: Tensor) -> list[float]:
    """Squared error of coding x [heads, tokens, head_dim] as a share of its energy, for each head."""
    return shares(coding_error(codec, x), x)
