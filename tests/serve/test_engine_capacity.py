"""`python -m research.engine_capacity`."""

from engine_answers import prompts_of
from served import tiny

from research.engine_capacity import in_serve


def test_capacity_hits_and_answers_are_those_of_the_engine() -> None:
    """What `research.engine_capacity` says of it."""
    loaded = tiny()
    first, second = prompts_of(loaded.model, 150, 150)
    found = in_serve(loaded, "rtn-4", None, [first, first[:128] + second[128:]], 32)
    assert found["capacity_tokens"] > 10_000
    assert (found["hits"], len(found["answer"])) == (96, 16)
