"""Rows of local files of text: parquet; JSON lines or lists, CSV, and texts as a whole, these also with .gz."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvcli.errors import CorpusError, error_text

_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text"}
_COMPRESSED = ".gz"
READ = f"{', '.join(_FORMATS)} (the last four also with {_COMPRESSED})"
_SURROGATE = re.compile("[\ud800-\udfff]")


def format_of(path: Path) -> str | None:
    """`parquet`, `json`, `csv` or `text`, by the name of a file; None: it is none of them."""
    name = path.with_suffix("") if path.suffix.lower() == _COMPRESSED else path
    kind = _FORMATS.get(name.suffix.lower())
    return None if kind == "parquet" and name != path else kind


def text_of(record: Any, column: str) -> str:
    """The text of a row; ValueError: it is no mapping, or has no text or something else in this column."""
    if not isinstance(record, dict):
        raise ValueError(str(record) if isinstance(record, ValueError) else "it is no record, a JSON object")
    if any(record.get(None) or ()):  # as csv tells it
        raise ValueError("it has more fields than the file has columns; quote a text with commas")
    if column not in record:
        raise ValueError(f"it has no column '{column}' (--text-column); its columns are {', '.join(map(str, record))}")
    text = record[column]
    if not isinstance(text, str):
        what = "has no text" if text is None else f"holds {type(text).__name__}, not text,"
        raise ValueError(f"it {what} in column '{column}'")
    if _SURROGATE.search(text):
        raise ValueError(f"it has no UTF-8 text in column '{column}'")
    return text


def read_rows(path: Path, column: str) -> Iterator[tuple[int, Any]]:
    """The rows of a file for `text_of`, counted from 1, JSON lines by line; CorpusError: it cannot be read."""
    kind = format_of(path)
    try:
        with gzip.open(path) if path.suffix.lower() == _COMPRESSED else path.open("rb") as file:
            binary = cast(BinaryIO, file)
            if kind == "json":
                yield from _json(binary)
            elif kind == "parquet":
                yield from enumerate(_parquet(binary, column), 1)
            else:
                newline = "" if kind == "csv" else None
                # bytes that are no UTF-8 become surrogates, so that only their row is refused
                text = io.TextIOWrapper(binary, "utf-8-sig", "surrogateescape", newline)
                csv.field_size_limit(sys.maxsize)
                yield from enumerate(_csv(text) if kind == "csv" else [{column: text.read()}], 1)
    except Exception as error:  # of several libraries
        raise CorpusError(f"cannot read the corpus '{path}': {error_text(error)}") from error


def _csv(text: io.TextIOWrapper) -> Iterator[Any]:
    """Rows; one whose quotes are wrong as an error. csv.Error: a quote is open at the end, and rows were lost in it."""
    rows = csv.DictReader(text, strict=True)
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            if "end of data" in str(error):
                raise
            yield ValueError(f"its quotes are wrong: {error}")


def _json(stream: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Records of a list, or of lines; what is no JSON as an error."""
    is_list = re.match(rb"(\xef\xbb\xbf)?\s*\[", stream.read(4096))
    stream.seek(0)
    if is_list:
        yield from enumerate(json.load(stream), 1)
        return
    for number, line in enumerate(stream, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, ValueError(f"cannot read it as JSON ({error_text(error)})")


def _parquet(stream: BinaryIO, column: str) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(stream)
    names = [column] if column in file.schema_arrow.names else None
    for batch in file.iter_batches(batch_size=1024, columns=names):
        yield from batch.to_pylist()
