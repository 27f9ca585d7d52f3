"""Suite `drift`: where long greedy generation first differs from the uncompressed model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from kvcli.commands.suite import Records
from kvcli.commands.tables import DataTable
from kvcli.eval.records import STAR, Figure, Unit, difference, interval, mean
from kvcli.eval.suite import REFERENCE, Case, ComparedOptions, CorpusOptions, EvalSuite, Measured, Prepared
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD

if TYPE_CHECKING:
    from kvcli.models.load import LoadedModel


class DriftOptions(CorpusOptions, ComparedOptions):
    """Options of `kvcli eval drift`."""

    length: ClassVar[str] = "prompt_tokens"

    num_prompts: int = Field(8, ge=1, description="prompts")
    prompt_tokens: int = Field(256, ge=1, description="tokens of a prompt")
    max_new_tokens: int = Field(128, ge=1, description="tokens generated")


class DriftPrompt(Unit):
    """One prompt continued greedily by both models."""

    figures = Figure("equal", "equal", "higher"), Figure("agreed", "agreed", "higher")

    prompt: int
    prompt_tokens: int
    tokens: int
    first_divergence: int | None
    agreed: int
    equal: float


def compare(tokens: Sequence[int], reference: Sequence[int]) -> tuple[int | None, int, float]:
    """The first index at which two continuations of one length differ, None if nowhere; tokens before; equal share."""
    equal = [a == b for a, b in zip(tokens, reference, strict=True)]
    first = None if all(equal) else equal.index(False)
    return first, len(equal) if first is None else first, sum(equal) / len(equal)


def prepare(options: DriftOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of methods; no token ends a text, so that all continuations are of one length."""
    from kvcli.eval.greedy import continuations

    prompts = options.sequences(loaded, options.num_prompts, options.prompt_tokens, reporter).tolist()
    pieces = [[prompt] for prompt in prompts]
    references, _ = continuations(loaded, REFERENCE, reporter, pieces, options.max_new_tokens)

    def rows() -> Iterator[Measured]:
        for case in cases:
            texts, memory = continuations(loaded, case, reporter, pieces, options.max_new_tokens)
            units = []
            for index, (tokens, expected) in enumerate(zip(texts, references, strict=True)):
                first, agreed, equal = compare(tokens, expected)
                sizes = {"prompt": index, "prompt_tokens": len(prompts[index]), "tokens": len(expected)}
                units.append(DriftPrompt(**sizes, first_divergence=first, agreed=agreed, equal=equal))
            yield Measured(case, units, memory)

    return Prepared({"tokens": prompts, "max_new_tokens": options.max_new_tokens}, rows())


def table(records: Records, options: DriftOptions) -> DataTable:
    """Shares of equal tokens, and first divergences."""
    rows = [
        {
            "method": record["label"],
            "equal %": f"{100 * mean(units, 'equal'):.1f}",
            "95 % interval": interval(record, "equal", "{:.1f}", 100),
            "difference": difference(record, "equal", "{:+.1f}", 100),
            "first divergence (median)": f"token {median_low(unit['agreed'] for unit in units)}",
            "never": f"{sum(unit['first_divergence'] is None for unit in units)} of {len(units)}",
        }
        for record, units in ((x, x["units"]) for x in records)
    ]
    first = records[0]["units"][0]
    title = (
        f"{records[0]['model']}: {first['tokens']} tokens generated after each of {len(records[0]['units'])} prompts "
        f"of {first['prompt_tokens']}, against the uncompressed model; {STAR}"
    )
    return DataTable.of(title, rows, ("difference", "never"))


SUITE = EvalSuite(
    name="drift",
    help="Where long greedy generation first differs from the uncompressed model's.",
    options=DriftOptions,
    example=f"kvcli eval drift --method {UNFITTED_METHOD} --num-prompts 4",
    saves_memory="lower --prompt-tokens or --max-new-tokens",
    unit=DriftPrompt,
    prepare=prepare,
    tabulate=table,
)
