"""Text of files: UTF-8 text such as Markdown, PDF and HTML."""

from __future__ import annotations

from pathlib import Path

from kvcli.errors import UsageError, error_text

_EXTRACTED = (".pdf", ".html", ".htm")


def text_of(path: Path) -> str:
    """The text of a file, by its suffix: `.pdf`, `.html` and `.htm`, else UTF-8.

    Raises:
        UsageError: a package that is not installed, a file that cannot be read so, or that has no text.
        OSError: it cannot be read.
    """
    kind = path.suffix.lower()
    try:
        text = _pdf(path) if kind == ".pdf" else _html(path) if kind in (".html", ".htm") else path.read_text("utf-8")
    except ImportError as error:
        raise UsageError(f"{path} needs packages: pip install 'kvcli[library]'") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text; convert it to text first") from error
    text = text.removeprefix("\ufeff").rstrip("\n")  # a mark of UTF-8, no text
    if not text.strip():
        raise UsageError(f"{path} {'has no text' if kind in _EXTRACTED else 'is empty'}")
    return text


def _pdf(path: Path) -> str:
    from pypdf import PdfReader

    try:
        pages = [page.extract_text() for page in PdfReader(path).pages]
    except OSError:
        raise
    except Exception as error:  # a parser of files of strangers raises errors of many kinds
        raise UsageError(f"{path} is no PDF that can be read: {error_text(error)}") from error
    return "\n\n".join(filter(None, map(str.strip, pages)))


def _html(path: Path) -> str:
    from inscriptis import get_text  # type: ignore[import-untyped]

    return str(get_text(path.read_text("utf-8")))
