"""Outside of `kvcli/methods/` and the registry, no line of code knows a method by name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcli.registry import BASELINE, FIT_NAMES, METHODS

NAMES = "|".join(map(re.escape, sorted({*METHODS, *FIT_NAMES} - {BASELINE}, key=len, reverse=True)))
TEXT = re.compile(rf"(?<![a-z])({NAMES})(?![a-z])", re.IGNORECASE)
IDENTIFIER = re.compile(rf"(?<![a-z])({NAMES.replace('-', '_')})", re.IGNORECASE)
WORD_START = re.compile(r"(?<=[a-z])(?=[A-Z])")


def sources(root: Path) -> list[Path]:
    """Files of the package that must not know methods."""
    files = sorted((root / "kvcli").rglob("*.py"))
    return [path for path in files if "methods" not in path.relative_to(root).parts[:-1] and path.name != "registry.py"]


def code(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Line, text, and whether it is an identifier, of all that is neither a docstring nor a comment."""
    bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
    documentation = {x.value for body in bodies for x in body if isinstance(x, ast.Expr)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            yield line, node.value, False
        elif isinstance(node, ast.ImportFrom):
            yield line, node.module or "", False
        for field in ("id", "attr", "name", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                yield line, f"{name} {WORD_START.sub(' ', name)}", True


def mentions(source: str) -> list[str]:
    """Lines of code that name a method; for the baseline, whose name is a dtype too, the name alone as a string."""
    lines = source.splitlines()
    named = {
        lineno
        for lineno, text, identifier in code(ast.parse(source))
        if (IDENTIFIER if identifier else TEXT).search(text) or (text == BASELINE and not identifier)
    }
    return [f"{lineno}: {lines[lineno - 1].strip()}" for lineno in sorted(named)]


def test_no_line_outside_methods_knows_one_by_name(repo_root: Path) -> None:
    known = {str(path.relative_to(repo_root)): mentions(path.read_text()) for path in sources(repo_root)}
    assert not {path: lines for path, lines in known.items() if lines}


@pytest.mark.parametrize(
    "line",
    [
        'x = "kivi"',
        'x = f"run kvcli train-codebook {y}"',
        "from kvcli.methods.commvq.config import x",
        "import kvcli.methods.qjl.codec",
        "x = CommVQConfig()",
        "squat_lambda = 1",
        'x = "squat-pre-2"',
        'x = ("fp16", 1)',
        "def fit_rtn(): pass",
        "class FitSquat: pass",
        'x = "needs fp8, or rtn"',
    ],
)
def test_names_in_code_are_seen(line: str) -> None:
    assert mentions(line)


@pytest.mark.parametrize(
    "line",
    [
        '"""Documentation may say kivi-2."""',
        "x = 1  # as in CommVQ",
        'x = "cache / fp16"',
        "x.fp16_bytes_per_token()",
        "partner = starting + restart",
        "from kvcli.registry import METHODS",
    ],
)
def test_other_code_is_not(line: str) -> None:
    assert not mentions(line)
