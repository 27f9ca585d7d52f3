"""Settings of SQuat (arXiv 2503.24358)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvcli.methods.scalar.config import KIVIConfig


class SQuatConfig(KIVIConfig):
    """Settings of SQuat on top of KIVI's; the paper uses squat_lambda 1e-3, lambda_scaling none, residual_length 32."""

    fit_settings: ClassVar[Mapping[str, Any]] = {"subspace_source": "calibration"}
    run_name: ClassVar[str] = "{method}-subspace"

    residual_length: int = Field(
        default=32, ge=0, le=2**20, description="last tokens in full precision; keys are encoded in blocks of as many"
    )
    subspace_dim: int = Field(default=5, ge=1, le=1024, description="dimensions r of the query subspace")
    squat_lambda: float = Field(
        default=0.1, ge=0, le=1e9, description="weight lambda of errors inside the subspace; 0 gives KIVI's codes"
    )
    lambda_scaling: Literal["per_token", "none"] = Field(
        default="per_token",
        description="per_token divides lambda by the number of queries, because singular values grow with the prompt",
    )
    block_size: int = Field(default=0, ge=0, le=4096, description="channels g quantized at a time; 0: head_dim / 2")
    subspace_solver: Literal["svd", "power"] = Field(
        default="svd", description="full eigendecomposition, or block power iteration"
    )
    query_space: Literal["auto", "pre_rope", "post_rope"] = Field(
        default="auto", description="queries that span the subspace; auto: those of the keys' own space"
    )
    share_batch: bool = Field(default=False, description="one subspace per batch, from its first sequence (paper)")
    subspace_source: Literal["prompt", "calibration"] = Field(
        default="prompt", description="queries of the prompt, or a subspace fitted offline with 'kvcli fit-subspace'"
    )
