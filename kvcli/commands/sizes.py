"""Bytes and other numbers as text, and text as bytes."""

import re

from kvcli.errors import UsageError


def size(count: float) -> str:
    """Bytes with a binary unit and two decimals, which `pydantic.ByteSize` does not give."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def number(value: float, template: str = "{:.4f}") -> str:
    """A number as text, in powers of ten where the template would make a zero of it."""
    text = template.format(value)
    return text if not value or re.search("[1-9]", text) else f"{value:{'+' * ('+' in template)}.1e}"


def share(ratio: float | None, digits: int = 2) -> str:
    """What is left where there was `ratio` times as much: 1/4.00, or 2.00 if it became more; - if that is not known."""
    if ratio is None:
        return "-"
    return f"1/{ratio:.{digits}f}" if ratio >= 1 else f"{1 / ratio:.{digits}f}"


def tokens(count: int) -> str:
    """A number of tokens, such as 8K."""
    return f"{count}" if count % 1024 else f"{count // 1024}K"


def parse_size(text: str | None) -> int | None:
    """Bytes: 24GiB and 24G are 24 * 1024**3, as torch counts; 24GB is 24 * 1000**3; UsageError: anything else.

    `pydantic.ByteSize` ignores what follows a valid beginning: it reads 1,5GiB as one byte.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B?)\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]) or "".join(match.groups()[1:]).lower() in ("", "i", "ib"):
        raise UsageError(f"'{text}' is not a size; write it like 24GiB or 24G")
    number, prefix, binary, unit = match.groups()
    return int(float(number) * (1000 if unit and not binary else 1024) ** " KMGT".index((prefix or " ").upper()))
