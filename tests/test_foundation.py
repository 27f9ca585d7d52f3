"""The order of the rooms, what an import does, and the budget of lines."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from fast import FAST

import kvcli

ROOMS = [
    ("_version", "errors", "packing", "progress"),
    ("machine", "ranks", "registry", "storage"),
    ("spec",),
    ("checkpoint", "fingerprint", "rope"),
    ("builtin_models",),
    ("hub",),
    ("seam",),
    ("models",),
    ("options", "paths", "sizes", "tables"),
    ("suite",),
    ("prompts",),
    ("kernels",),
    ("methods",),
    ("calibrate",),
    ("artifact",),
    ("fit",),
    ("cache",),
    ("attention",),
    ("contexts",),
    ("generate",),
    ("chat",),
    ("eval",),
    ("bench",),
    ("plan",),
    ("integrations",),
    ("cli",),
    ("__init__", "__main__"),
]
"""Rooms from left to right; a room imports from itself and from rooms to its left."""


def _imports(path: Path) -> set[str]:
    """Rooms that a file imports at run time; imports for type checking do not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    actual = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [f"kvcli.{alias.name}" for alias in node.names] if node.module == "kvcli" else [node.module]
        actual.update(name.split(".")[1] for name in names if name.startswith("kvcli."))
    return actual


def test_rooms_import_only_to_the_left(repo_root: Path) -> None:
    order = {room: place for place, rooms in enumerate(ROOMS) for room in rooms}
    package = repo_root / "kvcli"
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        assert room in order, f"{room} has no place in ROOMS"
        for other in _imports(path) - {room}:
            assert order[other] < order[room], f"{path.relative_to(repo_root)} imports {other}, which is to its right"


def test_integrations_are_imported_by_nothing_else(repo_root: Path) -> None:
    package = repo_root / "kvcli"
    importing = [path.relative_to(package) for path in package.rglob("*.py") if "integrations" in _imports(path)]
    assert not [path for path in importing if path.parts[0] != "integrations"]


def test_no_room_without_a_name(repo_root: Path) -> None:
    assert not [path for name in ("utils", "helpers", "common") for path in (repo_root / "kvcli").rglob(f"{name}.py")]


@pytest.mark.parametrize("statement", ["import kvcli", "import kvcli.cli.app", "import kvcli.registry"])
def test_nothing_heavy_is_imported(statement: str) -> None:
    heavy = ("torch", "transformers", "datasets", "lmcache")
    code = f"import sys; {statement}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_patches_nothing() -> None:
    code = (
        "from transformers import AttentionInterface as a; before = set(a().keys());"
        "import kvcli.attention.session, kvcli.calibrate.collect; print(set(a().keys()) == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def imported_modules(path: Path, modules: Collection[str]) -> set[str]:
    """Modules of kvcli that a file imports, in functions and for types only too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvcli"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                names.add(name if name in modules else node.module)
    return names & set(modules)


def test_no_modules_import_each_other() -> None:
    """Neither directly nor through others; imports in functions and for types count."""
    package = Path(kvcli.__file__).parent
    paths = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }
    imports = {name: imported_modules(path, paths) - {name} for name, path in paths.items()}
    while free := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in free:
            del imports[name]
    assert not imports


BUDGET = {
    ".": 3540,
    "artifact": 400,
    "attention": 1960,
    "bench": 2390,
    "cache": 2680,
    "calibrate": 1410,
    "cli": 3050,
    "contexts": 830,
    "eval": 2150,
    "integrations": 630,
    "kernels": 730,
    "methods": 7510,
    "plan": 530,
    "seam": 1550,
    "storage": 640,
}
"""Lines that a room of the package may have, `.` for the files at its root. A feature that needs more raises its room's
number in the same change and says why in the commit message; a change that deletes lowers it."""


def test_every_room_keeps_its_budget_of_lines() -> None:
    package = Path(kvcli.__file__).parent
    lines = dict.fromkeys(BUDGET, 0)
    for path in package.rglob("*.py"):
        *rooms, _ = path.relative_to(package).parts
        lines[rooms[0] if rooms else "."] += len(path.read_text().splitlines())
    over = {room: f"{count} lines of {BUDGET[room]}" for room, count in lines.items() if count > BUDGET[room]}
    rule = "delete lines, or raise the number of the room in BUDGET in this change and say why in the commit message"
    assert not over, f"{over}: {rule}"


def test_every_room_has_fast_tests(repo_root: Path) -> None:
    """Files of tests/support/fast.py exist; a file that is merged into another one gives its place there to it."""
    tests = repo_root / "tests"
    assert [name for name in FAST if not (tests / name).is_file()] == []
    rooms = {path.parent.name for path in tests.glob("*/test_*.py")}
    assert rooms - {Path(name).parent.name for name in FAST} == {"golden", "kernels", "sabotage"}
