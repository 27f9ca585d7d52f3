"""Suite `tools`: calls of functions from their JSON schemas, after a long output of an earlier call.

A request names a customer, and its call the number of the customer's order, which stands somewhere in the output: with
a cache that has lost it, calls can still be well-formed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from kvcli.commands.suite import Records
from kvcli.commands.tables import DataTable
from kvcli.errors import ModelError
from kvcli.eval.records import STAR, Figure, PromptUnit, difference, interval, mean, values_of
from kvcli.eval.suite import Case, ComparedOptions, EvalSuite, Prepared
from kvcli.progress import Reporter
from kvcli.registry import UNFITTED_METHOD

if TYPE_CHECKING:
    from kvcli.eval.greedy import Prompt
    from kvcli.models.load import LoadedModel

_MAX_NEW_TOKENS = 128
_FUNCTIONS: dict[str, tuple[str, list[str] | range, str]] = {
    "cancel_order": ("reason", ["fraud", "delay", "mistake"], "Cancel the order of customer {}; the reason is {}."),
    "choose_carrier": ("carrier", ["ship", "truck", "plane"], "Send the order of customer {} by {}."),
    "set_priority": ("priority", ["low", "normal", "urgent"], "Give the order of customer {} priority {}."),
    "refund_order": ("amount_cents", range(100, 10000), "Refund the order of customer {} with {} cents."),
    "change_quantity": ("quantity", range(2, 100), "Change the order of customer {} to {} items."),
    "postpone_order": ("days", range(2, 100), "Postpone the order of customer {} by {} days."),
}
"""Name to an argument beside the order's number, its values, and a request that names a customer and a value."""

_PROPERTIES: dict[str, dict[str, dict[str, Any]]] = {"list_orders": {}} | {
    name: {
        "order_id": {"type": "string"},
        argument: {"type": "integer"} if isinstance(values, range) else {"type": "string", "enum": values},
    }
    for name, (argument, values, _) in _FUNCTIONS.items()
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": name.replace("_", " ").capitalize(),
            "parameters": {"type": "object", "properties": of, "required": list(of)},
        },
    }
    for name, of in _PROPERTIES.items()
]
"""The functions as chat templates take them."""

_LISTED = {"name": "list_orders", "arguments": {}}


class ToolsOptions(ComparedOptions):
    """Options of `kvcli eval tools`."""

    contexts: list[Annotated[int, Field(ge=256, le=2**20)]] = Field(
        [1024], description="most tokens of the output before the request; repeatable"
    )
    num_prompts: int = Field(8, ge=1, description="requests per context")
    chat: bool | None = Field(None, description="use the chat template; default: if there is one")


class ToolsPrompt(PromptUnit):
    """One request; of its call, whether it fits a schema, and has the right function, and arguments."""

    figures = tuple(Figure(x, x, "higher") for x in ("arguments", "function", "valid"))

    context: int
    valid: float
    function: float
    arguments: float


def make_tool_prompts(loaded: LoadedModel, options: ToolsOptions, chat: bool, by_template: bool) -> list[Prompt]:
    """The requests of all contexts, the same for the same seed, in the template's form for tools or as plain JSON."""
    from kvcli.eval.greedy import Prompt, chat_in_pieces, in_pieces

    tokenizer: Any = loaded.tokenizer
    functions = "\n".join(json.dumps(tool["function"]) for tool in TOOLS)
    before = f"Functions:\n{functions}\n\nRequest: List the orders.\n\nCall: {json.dumps(_LISTED)}\n\nOutput:\n"
    prompts = []
    for context, index in product(options.contexts, range(options.num_prompts)):
        chosen = Random(f"{options.seed} {context} {index}")
        numbers = chosen.sample(range(10**5, 10**6), context // 4)
        orders: list[dict[str, Any]] = []
        left = context
        for order, customer in zip(numbers[::2], numbers[1::2], strict=False):
            row = {"order_id": f"R{order}", "customer": f"C{customer}", "items": chosen.randrange(2, 100)}
            left -= len(tokenizer(json.dumps(row) + "\n", add_special_tokens=False)["input_ids"])
            if left < 0:
                break
            orders.append(row)
        asked, name, output = chosen.choice(orders), chosen.choice(list(_FUNCTIONS)), "\n".join(map(json.dumps, orders))
        argument, values, text = _FUNCTIONS[name]
        value = chosen.choice(values)
        request = text.format(asked["customer"], value)
        expected = {"name": name, "arguments": {"order_id": asked["order_id"], argument: value}}
        if by_template:
            call = {"id": "call00001", "type": "function", "function": _LISTED}
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": "List the orders."},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "list_orders", "tool_call_id": "call00001", "content": output},
                {"role": "assistant", "content": "These are the orders."},
                {"role": "user", "content": request},
            ]
            pieces = chat_in_pieces(loaded, messages, request, tools=TOOLS)
            if asked["order_id"] not in tokenizer.decode(pieces[0]):
                raise ModelError(
                    f"the chat template of {loaded.name} leaves out what a function returned; use --no-chat"
                )
        else:
            pieces = in_pieces(loaded, before + output, f"Request: {request}", "Call:", chat)
        prompts.append(Prompt(pieces, json.dumps(expected), {"context": context, "prompt": index}))
    return prompts


def call_of(answer: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of the first call in an answer: a JSON object that has them, whatever stands around it."""
    for start in (place for place, character in enumerate(answer) if character == "{"):
        with suppress(ValueError, RecursionError):
            found = json.JSONDecoder().raw_decode(answer, start)[0]
            arguments = found.get("arguments", found.get("parameters"))
            if isinstance(found.get("name"), str) and isinstance(arguments, dict):
                return found["name"], arguments
    return None


def fits_schema(name: str, arguments: dict[str, Any]) -> bool:
    """Whether there is such a function, and it takes these arguments."""
    of = _PROPERTIES.get(name)
    return (
        of is not None
        and of.keys() == arguments.keys()
        and all(type(x) is {"string": str, "integer": int}[of[key]["type"]] for key, x in arguments.items())
        and all(x in of[key].get("enum", [x]) for key, x in arguments.items())
    )


def score(answer: str, expected: str) -> dict[str, bool]:
    """What is right about the call in an answer."""
    call, (name, arguments) = json.loads(expected), call_of(answer) or ("", {})
    valid, function = fits_schema(name, arguments), name == call["name"]
    return {"valid": valid, "function": function, "arguments": valid and function and arguments == call["arguments"]}


def prepare(options: ToolsOptions, loaded: LoadedModel, cases: Sequence[Case], reporter: Reporter) -> Prepared:
    """Rows of the uncompressed model and of methods."""
    from kvcli.eval.greedy import answered, uses_chat
    from kvcli.text.prompts import chat_text

    chat = uses_chat(loaded, options.chat)
    by_template = chat and all(
        name in chat_text(loaded, [{"role": "user", "content": ""}], tools=TOOLS) for name in _FUNCTIONS
    )
    reporter.say(f"functions are shown {'as the chat template shows them' if by_template else 'as plain JSON'}")
    prompts = make_tool_prompts(loaded, options, chat, by_template)

    def decided(answer: str, expected: str) -> bool:
        return call_of(answer) is not None

    return answered(loaded, cases, reporter, prompts, _MAX_NEW_TOKENS, decided, ToolsPrompt, score)


def table(records: Records, options: ToolsOptions) -> DataTable:
    """Calls by what is right about them; those with the right arguments by length of the output, too."""
    contexts = values_of(records, "context")
    rows = []
    for record in records:
        units = record["units"]
        at = {x: [unit for unit in units if unit["context"] == x] for x in contexts} if len(contexts) > 1 else {}
        rows.append(
            {
                "method": record["label"],
                **{f"{x} %": f"{100 * mean(units, x):.1f}" for x in ("valid", "function", "arguments")},
                "95 % interval": interval(record, "arguments", "{:.1f}", 100),
                "difference": difference(record, "arguments", "{:+.1f}", 100),
                **{f"{x} tokens": f"{100 * mean(some, 'arguments'):.1f}" for x, some in at.items()},
            }
        )
    title = (
        f"{records[0]['model']}: calls that fit a schema, of the right function, with the right arguments as well, "
        f"after outputs of {' and '.join(map(str, contexts))} tokens; {STAR}"
    )
    return DataTable.of(title, rows, ("valid %", "function %", "95 % interval"))


SUITE = EvalSuite(
    name="tools",
    help="Calls of functions from JSON schemas, after a long output.",
    options=ToolsOptions,
    example=f"kvcli eval tools --method {UNFITTED_METHOD} --contexts 2048",
    saves_memory="lower --contexts",
    unit=ToolsPrompt,
    prepare=prepare,
    tabulate=table,
    with_reference=True,
)
