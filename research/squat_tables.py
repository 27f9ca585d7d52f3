"""Table 3 of SQuat's paper (arXiv 2503.24358): lambda and the dimension of the query subspace."""

from __future__ import annotations

from collections.abc import Sequence

from kvcli.methods.squat.codec import METHOD
from kvcli.spec import ModelSpec
from research.paper_tables import Measurement, PaperTable

_LAMBDAS = (1e-4, 5e-4, 1e-3, 1e-2, 1e-1)
_ROWS = {
    5: (71.72, 73.09, 72.71, 70.96, 4.47),
    10: (72.93, 71.57, 71.65, 70.81, 6.98),
    20: (73.62, 72.71, 71.27, 69.22, 5.61),
    40: (72.63, 72.48, 72.18, 66.95, 6.67),
    60: (73.24, 72.56, 71.87, 68.68, 16.83),
}


def _measurements(spec: ModelSpec) -> Sequence[Measurement]:
    """Lambda is not divided by the number of queries, as in the paper; dimensions beyond the head's are left out."""
    shared = {"lambda_scaling": "none", "sink_length": 0}
    made = []
    for dim, accuracies in _ROWS.items():
        for weight, paper in zip(_LAMBDAS, accuracies, strict=True):
            settings = {"squat_lambda": weight, "subspace_dim": dim, **shared}
            made.append(Measurement({"r": dim, "lambda": weight}, METHOD, settings, paper))
    return [one for one in made if one.columns["r"] <= spec.head_dim]


TABLES = {
    "squat-3": PaperTable(
        "SQuat, Table 3: lambda and subspace dimension", "GSM8K of Llama-3.1-8B, percent", measurements=_measurements
    )
}
