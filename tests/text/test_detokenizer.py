"""The text of an answer is that of its tokens after the prompt's, however they come."""

import random
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer
from spm_tokenizer import PIECES, spm_tokenizer, tokens

from kvcli.serve.answers import Answer
from kvcli.text.detokenizer import Detokenizer, text_after, token_text

SPM, BYTES = spm_tokenizer(), byte_tokenizer()
SNOWMAN = tokens(*(f"<0x{byte:02X}>" for byte in "☃".encode()))


@pytest.mark.parametrize("prompt", [tokens("▁is"), tokens("<s>", "▁The", ":"), [*tokens("▁x"), *SNOWMAN]])
def test_the_space_before_the_first_word_is_kept(prompt: list[int]) -> None:
    assert text_after(SPM, prompt, tokens("▁Paris", "▁is")) == " Paris is"
    assert Detokenizer(SPM, prompt).add(tokens("▁▁▁", "▁return", "▁x")) == "    return x"


def test_a_text_without_a_prompt_begins_as_the_tokenizer_decodes_it() -> None:
    assert Detokenizer(SPM).add(tokens("▁Paris", "▁is")) == "Paris is" == SPM.decode(tokens("▁Paris", "▁is"))


def test_a_character_comes_when_its_last_token_is_there() -> None:
    stream = Detokenizer(SPM, tokens("▁x"))
    assert [stream.add([token]) for token in [*SNOWMAN, *tokens("▁f")]] == ["", "", "☃", " f"]


def test_a_character_that_a_prompt_begins_is_finished() -> None:
    assert Detokenizer(SPM, [*tokens("▁x"), *SNOWMAN[:2]]).add(SNOWMAN[2:]) == "☃"


def test_a_broken_character_is_shown_as_decoders_show_it() -> None:
    broken = [*tokens("▁f"), SNOWMAN[0], *tokens("▁Paris")]
    assert Detokenizer(SPM, tokens("▁x")).add(broken) == " f\ufffd Paris"
    stream = Detokenizer(SPM, tokens("▁x"))
    assert (stream.add([SNOWMAN[0]]), stream.end(), stream.end()) == ("", "\ufffd", "")


def test_a_token_is_told_as_it_reads_within_a_text_and_with_its_bytes() -> None:
    told = [token_text(SPM, token) for token in tokens("▁Paris", "▁", "x", "</s>", "<0xE2>")]
    assert told == [*((x, x.encode()) for x in (" Paris", " ", "x", "</s>")), ("\ufffd", b"\xe2")]
    assert [token_text(BYTES, token)[1] for token in BYTES("☃")["input_ids"]] == [b"\xe2", b"\x98", b"\x83"]


PARTS = {
    "whole characters": (
        SPM,
        [*([i] for i in range(259, len(PIECES))), SNOWMAN, *([i] for i in tokens("<0x0A>", "</s>"))],
    ),
    "any bytes": (BYTES, [[i] for i in range(len(BYTES))]),
}


@pytest.mark.parametrize(("tokenizer", "parts"), PARTS.values(), ids=PARTS)
def test_pieces_joined_are_the_whole_text(tokenizer: Any, parts: list[list[int]]) -> None:
    rng = random.Random(0)
    for _ in range(300):
        ids = [token for part in rng.choices(parts, k=rng.randint(1, 24)) for token in part]
        pieces: list[str] = []
        answer = Answer(tokenizer, len(ids), [], [], None, lambda piece, to=pieces: to.append(piece[1]))
        left = list(ids)
        while left:
            count = rng.randint(1, 4)
            answer.feed(left[:count])
            del left[:count]
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        assert "".join(pieces) == whole.rstrip("\ufffd")  # an answer does not end within a character
