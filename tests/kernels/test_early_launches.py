"""Kernels that may start before those before them have ended wait for these."""

import ast
from collections.abc import Iterator
from pathlib import Path


def early_launches(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names of kernels that are launched with `pdl_launch_options`, and whether they may be the first of a chain."""
    for call in ast.walk(tree):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Subscript)
            and isinstance(call.func.value, ast.Name)
        ):
            for options in (named.value for named in call.keywords if named.arg is None):
                for part in ast.walk(options):
                    if isinstance(part, ast.Call) and getattr(part.func, "id", "") == "pdl_launch_options":
                        yield call.func.value.id, bool(part.args)


def test_what_is_launched_early_waits(repo_root: Path) -> None:
    """The first of a chain with its first statement, so that nothing of the chain starts before."""
    trees = {path: ast.parse(path.read_text()) for path in (repo_root / "kvcli").rglob("*.py")}
    functions = [(path, x) for path, tree in trees.items() for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
    seen = 0
    for path, tree in trees.items():
        for name, may_be_first in early_launches(tree):
            found = [x for of, x in functions if x.name == name and of == path] or [
                x for _, x in functions if x.name == name
            ]
            (kernel,) = found
            statements = [ast.unparse(x) for x in kernel.body[1:]]
            waits = [i for i, text in enumerate(statements) if "pdl_wait()" in text or "pdl_begin()" in text]
            assert waits, f"{name} does not wait"
            assert not may_be_first or statements[0] == "pdl_begin()", f"{name} does not begin with pdl_begin"
            seen += 1
    assert seen > 15
