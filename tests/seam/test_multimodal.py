"""Models of text and images: their language model through the cache, with and without an image in the prompt."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import WINDOW
from passes import generated
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvcli
from kvcli.errors import CacheError, UsageError
from kvcli.seam.decoder import find_decoder
from kvcli.seam.versions import CACHE_ARGUMENT

TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 4}
"""Of the tower for images: as many as of the language model, so that the two can be taken for each other."""
QWEN = {"depth": 4, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
ALTERNATE = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16}
IMAGE, IMAGE_TOKENS, BEGIN = 90, 4, 92
QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": BEGIN, "vision_end_token_id": 93}

PARTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {"model_type": "clip_vision_model", "projection_dim": 32, "image_size": 16, "patch_size": 8, **LAYERS},
        {"model_type": "llama", "head_dim": 16},
        {"image_token_index": IMAGE, "image_seq_length": IMAGE_TOKENS},
    ),
    "mistral3": (
        {"model_type": "pixtral", "head_dim": 16, "image_size": 16, "patch_size": 4, **LAYERS},
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        {"image_token_index": IMAGE, "spatial_merge_size": 2},
    ),
    "internvl": (
        {"image_size": [16, 16], "patch_size": [4, 4], **LAYERS},
        {"model_type": "qwen2"},
        {"image_token_id": IMAGE, "image_seq_length": IMAGE_TOKENS, "downsample_ratio": 0.5},
    ),
    "gemma3": (
        {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8, **LAYERS},
        {"model_type": "gemma3_text", **ALTERNATE},
        {"image_token_id": IMAGE, "mm_tokens_per_image": IMAGE_TOKENS, "boi_token_index": BEGIN},
    ),
    "qwen2_vl": ({"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, **QWEN}, SECTIONS, QWEN_IDS),
    "qwen2_5_vl": ({**QWEN_WIDTHS, "window_size": 16, "fullatt_block_indexes": [1], **QWEN}, SECTIONS, QWEN_IDS),
    "qwen3_vl": (
        {**QWEN_WIDTHS, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], **QWEN},
        {**SECTIONS, "head_dim": 16},
        QWEN_IDS,
    ),
}
"""What configs of the tower for images, the language model and both together need."""


@cache
def model_of(model_type: str) -> Any:
    torch.manual_seed(1)
    vision, text, both = PARTS[model_type]
    config = CONFIG_MAPPING[model_type](vision_config=vision, text_config={**TEXT, **text}, **both)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = model.config.get_text_config().eos_token_id = None
    for name, weight in find_decoder(model).named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.data *= 4
    return model


def prompt(model_type: str, image: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 80, (1, 30), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not image:
        return inputs
    ids[0, 4], ids[0, 5 : 5 + IMAGE_TOKENS] = BEGIN, IMAGE
    if "qwen" in model_type:
        pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
        kinds = {"mm_token_type_ids": (ids == IMAGE).int(), "image_grid_thw": torch.tensor([[1, 4, 4]])}
        return {**inputs, **kinds, "pixel_values": pixels}
    inputs["pixel_values"] = torch.randn(1, 3, 16, 16, generator=generator)
    if model_type == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).int()
    if model_type == "mistral3":
        inputs["image_sizes"] = torch.tensor([[16, 16]])
    return inputs


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("model_type", [x for x in PARTS if x in CONFIG_MAPPING])
def test_tokens_are_those_of_stock(model_type: str, image: bool) -> None:
    model, inputs = model_of(model_type), prompt(model_type, image)
    if image and model_type == "gemma3":  # tokens of an image see each other
        with kvcli.attach(model, "fp16", **WINDOW) as session, pytest.raises(CacheError, match="mask must be causal"):
            generated(model, inputs, session.new_cache())
        return

    def stock(**changes: Tensor) -> tuple[Tensor, Tensor]:
        return generated(model, {**inputs, **changes}, DynamicCache(config=model.config))

    expected, logits = stock()
    if image:  # it is looked at
        assert not torch.allclose(stock(pixel_values=-inputs["pixel_values"])[1], logits, atol=1e-3)
    for method, settings in (("fp16", WINDOW), ("kivi-2", {"group_size": 16, "residual_length": 16})):
        with kvcli.attach(model, method, **settings) as session:
            cache = session.new_cache()
            tokens, ours = generated(model, inputs, cache)
        assert cache.memory().num_encoded
        assert ours.isfinite().all()
        if method == "fp16":
            assert torch.equal(tokens, expected)
            assert (ours - logits).abs().max() < 1e-4 * logits.abs().max()
    assert torch.equal(stock()[1], logits)


@pytest.mark.parametrize("model_type", [x for x in PARTS if "qwen" in x and x in CONFIG_MAPPING])
def test_texts_go_on_where_they_ended_whatever_was_read_in_between(model_type: str, tmp_path: Path) -> None:
    """The model keeps how many positions fewer than tokens an image takes, of the text that it has read last."""
    model, (image, text) = model_of(model_type), [prompt(model_type, x) for x in (True, False)]

    def made(cache: Any, count: int, **inputs: Any) -> Tensor:
        inputs |= {"attention_mask": torch.ones_like(inputs["input_ids"]), CACHE_ARGUMENT: cache}
        tokens: Tensor = model.generate(**inputs, max_new_tokens=count, do_sample=False)
        return tokens

    stock = [made(DynamicCache(config=model.config), 9, **x) for x in (image, text)]
    with kvcli.attach(model, "fp16", **WINDOW) as session, torch.no_grad():
        caches = [session.new_cache(), session.new_cache()]
        tokens = [made(cache, 3, **x) for x, cache in zip((image, text), caches, strict=True)]
        for i in (0, 1, 0, 1):
            tokens[i] = made(caches[i], 3, input_ids=tokens[i])
        assert all(map(torch.equal, tokens, stock))
        made(session.new_cache(), 1, **image)
        assert torch.equal(session.generate(text["input_ids"], max_new_tokens=9).sequences, stock[1])
        with pytest.raises(UsageError, match="texts with images"):
            session.generate(torch.cat((tokens[0], tokens[0][:, -1:]), dim=1), cache=caches[0], mode="steps")
        caches[1].save(tmp_path / "text")
        with pytest.raises(CacheError, match="a text with images"):
            caches[0].save(tmp_path / "image")
