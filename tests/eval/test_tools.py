"""Tool calls: prompts, in a template's form and as plain JSON, and what is a right call."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from byte_tokenizer import CHAT, byte_tokenizer

from kvcli.cli.output import Output
from kvcli.errors import ModelError
from kvcli.eval import tools
from kvcli.eval.suite import REFERENCE
from kvcli.eval.tools import ToolsOptions, call_of, fits_schema, make_tool_prompts
from kvcli.models.load import LoadedModel

WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function'] | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OPTIONS = ToolsOptions(contexts=[300, 900], num_prompts=4)


def model_of(loaded: LoadedModel, template: str | None) -> LoadedModel:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return replace(loaded, tokenizer=tokenizer)


@pytest.mark.parametrize(("template", "by_template"), [(WITH_TOOLS, True), (CHAT, False), (None, False)])
def test_requests_ask_for_an_order_that_stands_in_the_output(
    loaded: LoadedModel, template: str | None, by_template: bool
) -> None:
    model, chat = model_of(loaded, template), template is not None
    prompts = make_tool_prompts(model, OPTIONS, chat, by_template)
    assert prompts == make_tool_prompts(model, OPTIONS, chat, by_template)
    assert prompts != make_tool_prompts(model, OPTIONS.model_copy(update={"seed": 1}), chat, by_template)
    assert [prompt.place for prompt in prompts] == [{"context": c, "prompt": i} for c in (300, 900) for i in range(4)]
    for prompt in prompts:
        text, question = (model.tokenizer.decode(piece) for piece in prompt.pieces)
        call = json.loads(prompt.expected)
        assert fits_schema(call["name"], call["arguments"])
        lines = re.findall(r'^(?:.*?>)?(\{"order_id".*?\})', text, re.MULTILINE)
        orders = {row["customer"]: row["order_id"] for row in map(json.loads, lines)}
        assert len(orders) == len(lines)
        assert prompt.place["context"] - 80 < sum(len(line) + 1 for line in lines) <= prompt.place["context"]
        assert orders[re.search(r"customer (C\d+)", question)[1]] == call["arguments"]["order_id"]
        (value,) = (x for name, x in call["arguments"].items() if name != "order_id")
        assert str(value) in question
        assert call["arguments"]["order_id"] not in question
        assert all(name in text for name in tools._FUNCTIONS)
        assert question.endswith("<assistant>" if by_template else "Call:")
        assert ("<tool>" in text) == by_template
    assert len({json.loads(prompt.expected)["name"] for prompt in prompts}) > 2


@pytest.mark.parametrize(("template", "form"), [(WITH_TOOLS, "chat template"), (CHAT, "plain"), (None, "plain")])
def test_the_form_is_the_templates_where_it_shows_functions(
    loaded: LoadedModel, template: str | None, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    reporter = Output(quiet=True)
    reporter.say = said.append  # type: ignore[method-assign]
    prepared = tools.prepare(OPTIONS, model_of(loaded, template), [REFERENCE], reporter)
    assert form in said[0]
    text = byte_tokenizer().decode(prepared.protocol["prompts"][0].pieces[0])
    assert ("<tool>" in text) == (form == "chat template")


def test_a_template_that_leaves_out_outputs_is_refused(loaded: LoadedModel) -> None:
    template = WITH_TOOLS.replace("{{ m['content'] }}", "{% if m['role'] != 'tool' %}{{ m['content'] }}{% endif %}")
    with pytest.raises(ModelError, match="leaves out what a function returned; use --no-chat"):
        make_tool_prompts(model_of(loaded, template), OPTIONS, True, True)


CALL = '{"name": "refund_order", "arguments": {"order_id": "R1", "amount_cents": 7}}'


@pytest.mark.parametrize(
    ("answer", "valid", "function", "arguments"),
    [
        (CALL, 1, 1, 1),
        (f"<tool_call>\n{CALL}\n</tool_call>", 1, 1, 1),
        (f"{{well}} I do: [{CALL.replace('arguments', 'parameters')}] and more", 1, 1, 1),
        (CALL.replace("R1", "R2"), 1, 1, 0),
        (CALL.replace("7", "8"), 1, 1, 0),
        (CALL.replace("7", '"7"'), 0, 1, 0),
        (CALL.replace("7", "true"), 0, 1, 0),
        (CALL.replace(', "amount_cents": 7', ""), 0, 1, 0),
        (CALL.replace("7", '7, "more": 1'), 0, 1, 0),
        (CALL.replace("refund_order", "pay_order"), 0, 0, 0),
        ('{"name": "list_orders", "arguments": {}}', 1, 0, 0),
        ('{"name": "set_priority", "arguments": {"order_id": "R1", "priority": "low"}}', 1, 0, 0),
        ('{"name": "set_priority", "arguments": {"order_id": "R1", "priority": "lower"}}', 0, 0, 0),
        (CALL[:-1], 0, 0, 0),
        ('{"name": 3, "arguments": {}} {"name": "x"} {"a":', 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_a_call_is_valid_of_the_right_function_and_with_the_right_arguments(
    answer: str, valid: float, function: float, arguments: float
) -> None:
    assert tools.score(answer, CALL) == {"valid": valid, "function": function, "arguments": arguments}


def test_generation_ends_with_the_call(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(_: Any, new_cache: Any, pieces: Any, limit: int, *, stop: Any, done: Any, session: Any) -> Any:
        tokens = loaded.tokenizer(CALL + " and so on")["input_ids"]
        return tokens[: next(end for end in range(1, limit) if done(tokens[:end]))], new_cache()

    monkeypatch.setattr("kvcli.eval.greedy.greedy", fake)
    (row,) = tools.prepare(OPTIONS, loaded, [REFERENCE], Output(quiet=True)).rows
    assert {unit.answer for unit in row.units} == {CALL}
    assert call_of(CALL) == ("refund_order", {"order_id": "R1", "amount_cents": 7})
