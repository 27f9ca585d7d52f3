"""A tokenizer like that of Llama 2: a space belongs to the word after it, unknown characters are bytes."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

WORDS = ("Paris", "return", "The", "capital", "of", "France", "is", "x", "def", "f", "(", ")", ":")
PIECES = ("<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁▁▁", *(f"▁{x}" for x in WORDS), *WORDS)


def spm_tokenizer(byte_fallback: bool = True) -> Any:
    scores = [(piece, -1.0 if len(piece) > 1 else -5.0) for piece in PIECES]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def tokens(*pieces: str) -> list[int]:
    """The ids of pieces as they are written in the vocabulary."""
    return [PIECES.index(piece) for piece in pieces]
