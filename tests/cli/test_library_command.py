"""`kvcli library` and `kvcli ask --library`: documents of files, read once, listed, shared, asked side by side."""

import subprocess
import sys
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from console import invoke, refused, result, says
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from kvcli.cli.inputs import read_texts, text_of
from kvcli.errors import UsageError

HOW = ("--method", "fp16", "--residual-length", "8", "--sink-length", "2")
STORE = ("--store", "s")
ASKED = (*STORE, "--max-new-tokens", "12")


def pdf_of(text: str) -> bytes:
    """A file of one page."""
    writer, font = PdfWriter(), DictionaryObject()
    page, content = writer.add_blank_page(300, 99), DecodedStreamObject()
    font.update({NameObject(f"/{x}"): NameObject(f"/{y}") for x, y in (("Type", "Font"), ("Subtype", "Type1"))})
    font[NameObject("/BaseFont")] = NameObject("/Helvetica")
    fonts = DictionaryObject({NameObject("/F"): font})
    page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
    content.set_data(f"BT /F 12 Tf 9 50 Td ({text}) Tj ET".encode())
    page[NameObject("/Contents")] = writer._add_object(content)
    written = BytesIO()
    writer.write(written)
    return written.getvalue()


@pytest.fixture(autouse=True)
def _files(chatty: Any) -> None:
    Path("texts").mkdir()
    Path("texts/whale.txt").write_text("Call me Ishmael. I thought I would see the sea.")
    Path("texts/times.md").write_text("# Times\n\nIt was the best of times, it was the worst of times.")
    Path("texts/page.html").write_text("<html><body><article><p>A river is long and slow.</p></article></body></html>")
    Path("texts/lake.pdf").write_bytes(pdf_of("The lake is deep and cold."))


def add(*words: str, **options: Any) -> Any:
    return result("library", "add", *words, *HOW, *STORE, "--json", **options)


def test_a_folder_is_read_once_and_asked_across() -> None:
    first = add("texts")
    assert [x["document"] for x in first["documents"]] == ["lake", "page", "times", "whale"]
    assert all(x["read_tokens"] == x["tokens"] for x in first["documents"])
    assert [x["read_tokens"] for x in add("texts")["documents"]] == [0] * 4
    asked = result("ask", "--library", "library", "What did Ishmael see?", "--top", "2", *ASKED, "--json")
    assert asked["documents"][0] == "whale"
    assert len(asked["documents"]) <= 2
    named = ("--document", "times", "--document", "whale", "--repair", "0")
    named_twice = [result("ask", "--library", "library", "Who?", *named, *ASKED, "--json") for _ in range(2)]
    assert named_twice[0]["text"] == named_twice[1]["text"]
    assert (named_twice[0]["documents"], named_twice[0]["reread_tokens"]) == (["times", "whale"], 0)
    says(result("ask", "--library", "library", "Who?", *named[:4], *ASKED).stderr, "read again, side by side in")


def test_a_changed_file_is_read_anew() -> None:
    add("texts/whale.txt")
    Path("texts/whale.txt").write_text("Call me Queequeg.")
    assert add("texts/whale.txt")["documents"][0]["read_tokens"] > 0
    rows = result("library", "show", *STORE, "--json")["rows"]
    assert [row["document"] for row in rows] == ["whale"]


def test_documents_that_memory_may_not_hold_together_are_told_before_they_are_loaded(monkeypatch: Any) -> None:
    add("texts")
    named = ("--document", "times", "--document", "whale")
    tokens = sum(x["tokens"] for x in add("texts")["documents"] if x["document"] in named)
    monkeypatch.setattr("kvcli.text.library.Library.compose", None)
    monkeypatch.setattr("kvcli.commands.machine.free_bytes", lambda device: 2**17)
    line = refused("ask", "--library", "library", "Who?", *named, "--method", "fp16", *ASKED)
    says(line, f"times, whale have {tokens} tokens together, which may take", "128.00 KiB are free", "would fit; name")


def test_documents_of_another_method_are_not_replaced() -> None:
    """Nor do they stand beside others, with which they could not be asked."""
    add("texts/whale.txt")
    for name in ("whale.txt", "times.md"):
        line = refused("library", "add", f"texts/{name}", *HOW[:4], "--sink-length", "3", *STORE)
        says(line, "library 'library' in s was made with", "take another name, or remove it with 'kvcli library rm'")
    assert add("texts/whale.txt")["documents"][0]["read_tokens"] == 0
    result("library", "rm", *STORE)
    assert result("library", "add", "texts/whale.txt", *HOW[:4], "--sink-length", "3", *STORE)


def test_libraries_are_listed_shown_and_removed() -> None:
    add("texts", "--name", "books")
    add("texts/whale.txt", "--name", "sea")
    listed = result("library", "list", *STORE)
    says(listed.stdout, "books", "sea", "fp16")
    says(result("library", "list", "--name", "sea", *STORE).stdout, "whale")
    says(result("library", "show", "whale", "--name", "sea", *STORE).stdout, "whale: ", "context sea.whale-")
    result("library", "rm", "whale", "--name", "books", *STORE)
    assert "has no document 'whale'; it has lake, page, times" in refused(
        "library", "show", "whale", "--name", "books", *STORE, code=1
    )
    result("library", "rm", "--name", "books", *STORE)
    assert "there is no library 'books' in s" in refused("library", "show", "--name", "books", *STORE, code=1)
    says(result("contexts", "list", *STORE).stdout, "sea.whale-")


def test_a_library_is_shared_by_files() -> None:
    """Exported, pushed to a folder, pulled, and imported into another store."""
    add("texts", "--name", "books")
    answer = result("ask", "--library", "books", "Who?", "--document", "lake", "--document", "page", *ASKED, "--json")
    result("library", "export", "--name", "books", "--out", "files", *STORE)
    assert "exists already" in refused("library", "export", "--name", "books", "--out", "files", *STORE)
    Path("shared").mkdir()
    pushed = result("push", "files", "shared", "--json")
    pulled = result("pull", "shared", "--sha256", pushed["sha256"], "--out", "got")
    assert "kvcli contexts import got/books.lake-" in pulled.stderr
    result("contexts", "import", *map(str, sorted(Path("got").glob("*.safetensors"))), "--store", "other")
    there = ("--store", "other", *ASKED[2:])
    again = result("ask", "--library", "books", "Who?", "--document", "lake", "--document", "page", *there, "--json")
    assert again["text"] == answer["text"]


def test_files_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_texts([Path("texts/whale.txt").rename("texts/caf\udce9.txt")])[0].name == "caf?"
    assert text_of(Path("texts/lake.pdf")) == "The lake is deep and cold."
    assert text_of(Path("texts/page.html")).strip() == "A river is long and slow."
    Path("empty.md").write_text("\n")
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("no.pdf").write_bytes(b"no PDF")
    for name, match in (("empty.md", "is empty"), ("latin.txt", "not UTF-8"), ("no.pdf", "no PDF that can be read")):
        with pytest.raises(UsageError, match=match):
            text_of(Path(name))
    monkeypatch.setattr("pypdf.PageObject.extract_text", lambda page: "a\ud83d\ude00\ud83d")
    assert text_of(Path("texts/lake.pdf")) == "a\U0001f600\ufffd"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("library", "add", *STORE), "name files or folders"),
        (("library", "add", "texts", "--name", "a.b", *STORE), "has no dot"),
        (("library", "add", "texts", "--name", "../a", *STORE), "is no name"),
        (("library", "add", "nowhere.txt", *STORE), "cannot read nowhere.txt"),
        (("library", "add", "texts/whale.txt", "texts/whale.txt", *STORE), "two files are named whale"),
        (("library", "add", "texts", "--method", "rtn-2", *STORE), "documents cannot stand side by side"),
        (("library", "list", "--store", "nowhere"), "there is no store"),
        (("ask", "--library", "books", *STORE), "the question is missing"),
        (("ask", "--library", "books", "Who?", "--store", "nowhere"), "there is no store"),
        (("ask", "texts/whale.txt", "Who?", "--document", "whale", *STORE), "--document is of a --library"),
        (("ask", "--library", "books", "texts/whale.txt", "Who?", *STORE), "a library is asked in place of files"),
    ],
)
def test_slips_are_told(words: tuple[str, ...], match: str) -> None:
    assert match in refused(*words)


def test_klt_is_the_default() -> None:
    assert "no klt artifact" in refused("library", "add", "texts", *STORE, code=1)


def test_a_library_or_document_that_is_not_there_is_told() -> None:
    for words in (("library", "list"), ("library", "show"), ("ask", "--library", "books", "Who?")):
        assert "no store of contexts in s; 'kvcli library add' makes one" in refused(*words, *STORE)
    add("texts/whale.txt", "--name", "sea")
    assert "there is no library 'books'" in refused("ask", "--library", "books", "Who?", *STORE, code=1)
    words = ("ask", "--library", "sea", "Who?", "--document", "lake", *STORE)
    assert "library 'sea' has no document 'lake'" in refused(*words, code=1)


def test_processes_share_the_work(chatty: Any) -> None:
    """A document that another process reads is waited for."""
    add("texts/whale.txt")
    name = f"library.lake-{sha256(b'lake').hexdigest()[:8]}"
    code = f"import time, fcntl; f = open('s/{name}.lock', 'w'); fcntl.flock(f, 2); print(flush=True); time.sleep(1)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        done = invoke("library", "add", "texts", *HOW, *STORE)
        assert other.wait() == 0
    assert done.exit_code == 0
    assert done.stderr.index("times:") < done.stderr.index("lake:")
