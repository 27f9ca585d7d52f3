"""The packages that are measured, pinned, and what an environment of each holds."""

from __future__ import annotations

from dataclasses import dataclass

TORCH, TRANSFORMERS = "torch==2.13.0", "transformers==5.24.0"
BASE = (TORCH, TRANSFORMERS, "accelerate==1.15.0")
"""What the environments share, unless a package asks for another version."""

OLDER = ("transformers==5.3.0",)
"""What settings that fail are tried with once more."""


@dataclass(frozen=True)
class Rival:
    """A package; the first requirement is the one that records name, the others are what it needs beside it."""

    adapter: str
    requirements: tuple[str, ...]
    for_transformers: bool = True
    """Whether its cache is one for transformers, not for a program of its own."""
    older: tuple[str, ...] = OLDER
    """What settings that fail are tried with once more: what was current when the package appeared."""

    @property
    def package(self) -> str:
        """Its name without extras and version."""
        return self.requirements[0].split("==")[0].split("[")[0]

    @property
    def version(self) -> str:
        """The pinned version."""
        return self.requirements[0].split("==")[1]


RIVALS = [
    Rival("transformers_quantized", (TRANSFORMERS, "hqq==0.2.8", "optimum-quanto==0.2.7")),
    Rival("nexusquant", ("nexusquant-kv[hf]==0.6.3",)),
    Rival("tiny_turboquant", ("tiny-turboquant==0.18.0",)),
    Rival("kakeyalattice", ("kakeyalattice[hf]==1.5.0",)),
    Rival("akv", ("akv-cache==1.4.0",)),
    Rival("turboquant", ("turboquant==0.2.0",), older=(*OLDER, "numpy==2.2.6")),
    Rival("turbokv", ("turbokv==0.1.0",)),
    Rival("turboquant_explained", ("turboquant-explained==0.1.1",), older=("transformers==4.53.3",)),
    Rival("turboquant_serve", ("turboquant-serve==0.1.2",)),
    Rival("turboquant_kv", ("turboquant-kv[hf,triton]==1.0.0",)),
    Rival("turboquantcpu", ("turboquantcpu==0.1.0",)),
    Rival("tqai", ("tqai[torch]==0.6.1",)),
    Rival("fade_kv", ("fade-kv==1.1.0",)),
    Rival("spectralquant", ("spectralquant[hf]==0.3.1",)),
    Rival("ik_llama", ("ik-llama-cpp-python==0.1.5",), for_transformers=False),
    Rival("openvino_cpu", ("openvino==2026.4.1", "openvino-genai==2026.4.1.0"), for_transformers=False),
    Rival("mlx_cpu", ("mlx[cpu]==0.32.4", "mlx-lm==0.32.2"), for_transformers=False),
]
