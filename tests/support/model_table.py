"""What becomes of every type of causal language model in the installed transformers, as tables for docs/models.md.

`python tests/support/model_table.py` writes them anew.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from factories import WINDOW
from families import CHANGES, make, tiny_config
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import kvcli
from kvcli.errors import KvcliError
from kvcli.seam.versions import with_cache

BEGIN, END = "<!-- tests/support/model_table.py: begin -->", "<!-- tests/support/model_table.py: end -->"
MAX_PARAMETERS = 3 * 10**7


@dataclass(frozen=True)
class Outcome:
    """What became of a tiny model of one type: `works`, `partly`, `refused`, `not built`, or `wrong`, and why."""

    model_type: str
    result: str
    reason: str = ""


def outcomes() -> list[Outcome]:
    """Of every type that transformers maps to a causal language model, in the order of the alphabet."""
    return [outcome(model_type) for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]


def outcome(model_type: str) -> Outcome:
    """Attaches to a tiny model of one type and compares its logits with stock's."""
    if "text_config" in getattr(CONFIG_MAPPING[model_type], "sub_configs", ()):
        return Outcome(model_type, "not built", "has parts beside its text model")
    try:
        with torch.device("meta"):
            config = tiny_config(model_type)
            size = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
        if size > MAX_PARAMETERS:
            return Outcome(model_type, "not built", "is large, whatever its config says")
        model = make(model_type)
    except (AssertionError, AttributeError, TypeError, ValueError):  # what configs raise that do not fit
        return Outcome(model_type, "not built", "needs more in its config than sizes")
    try:
        session = kvcli.attach(model, "fp16", **WINDOW)
    except KvcliError as error:
        return Outcome(model_type, "refused", _reason(str(error)))
    with session:
        ours = _logits(model, session.new_cache())
    error = (ours - (theirs := _logits(model, DynamicCache(config=model.config)))).abs().max() / theirs.abs().max()
    if not error <= 1e-3:
        return Outcome(model_type, "wrong", f"its logits differ by {100 * error:.2g} %")
    own = sum(layer.own_rotation for layer in session._seam.attention.layers)
    notes = [share] if (share := _share(model_type)) else []
    others = session.spec.other_layers
    if others and not share:
        notes.append("some layers")
    if CHANGES.get(model_type, {}).get("sliding_window", 0) is None:
        notes.append("if its config has no `sliding_window`")
    if own:
        notes.append("keys are compressed after RoPE")
    return Outcome(model_type, "partly" if others or own else "works", "; ".join(notes))


def tables(found: list[Outcome]) -> str:
    """Markdown of what was found."""
    of = {result: [x for x in found if x.result == result] for result in ("works", "partly", "refused", "not built")}
    works, partly, refused, untried = (len(x) for x in of.values())
    right = ", ".join(f"`{x.model_type}`" + (f" ({x.reason})" if x.reason else "") for x in of["works"])
    right = re.sub(r"(?<!,) ", "\xa0", right)  # reasons are not broken
    return "\n".join([
        f"Found with transformers {transformers.__version__}: {len(found)} types, of which {works} work, "
        f"{partly} work in part, {refused} are refused and\n{untried} were not tried.",
        "\nAll layers are compressed:\n",
        textwrap.fill(f"{right}.", 117, break_long_words=False, break_on_hyphens=False).replace("\xa0", " "),
        "\nSome layers are compressed, or keys after RoPE only:\n\n| what is compressed | types |\n|---|---|",
        *_by_reason(of["partly"]),
        "\nRefused:\n\n| why | types |\n|---|---|",
        *_by_reason(of["refused"]),
        "\nNot tried, because a tiny model of this type\n\n| why | types |\n|---|---|",
        *_by_reason(of["not built"]),
    ])  # fmt: skip


def _by_reason(found: list[Outcome]) -> list[str]:
    reasons = sorted({x.reason for x in found}, key=lambda reason: (-sum(x.reason == reason for x in found), reason))
    return [f"| {r} | {', '.join(f'`{x.model_type}`' for x in found if x.reason == r)} |" for r in reasons]


def _share(model_type: str) -> str:
    """Layers of full attention in the config that transformers makes if nothing is said, unless these are all."""
    layers = DynamicCache(config=CONFIG_MAPPING[model_type]()).layers
    full = sum(type(layer) is DynamicLayer for layer in layers)
    return f"{full} of {len(layers)} layers" if 0 < full < len(layers) else ""


def _reason(text: str) -> str:
    text = re.sub(r"^model type '[^']*' cannot be compressed: | by [\d.e+]+ %", "", text)  # differs between machines
    text = re.sub(r"^[\w.]*\.\d+\.[\w.]*:? ", "", re.sub(r"<class '([\w.]*)'>", r"\1", text))
    return re.sub(r"^\w+ has no list of its \d+ layers.*", "its layers are in no single list", text)


def _logits(model: Any, cache: Any) -> torch.Tensor:
    """Of a prompt of 31 tokens and of three after it, one by one, at the positions that `generate` gives them."""
    ids, sizes = torch.randint(3, 90, (1, 34), generator=torch.Generator().manual_seed(0)), (31, 1, 1, 1)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    logits = []
    with torch.no_grad():
        for x, places in zip(ids.split(sizes, dim=1), torch.arange(34)[None].split(sizes, dim=1), strict=True):
            positions = {"position_ids": places} if takes_positions else {}
            logits.append(model(input_ids=x, **positions, **with_cache(cache)).logits)
    return torch.cat(logits, dim=1)


def replaced(page: str, new: str) -> str:
    """A page with new tables between the markers."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    page = Path(__file__).resolve().parents[2] / "docs" / "models.md"
    page.write_text(replaced(page.read_text(), tables(list(outcomes()))))
