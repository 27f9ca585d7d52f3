"""The order of the rooms, what an import does, and the caps of lines."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from fast import FAST

ROOMS = [
    ("_version", "errors", "progress"),
    ("registry", "rope", "spec", "storage"),
    ("kernels", "seam"),
    ("methods", "models"),
    ("cache", "calibrate", "commands"),
    ("artifact",),
    ("attention",),
    ("contexts", "paged"),
    ("plan",),
    ("text",),
    ("eval", "integrations", "serve"),
    ("bench",),
    ("report",),
    ("cli",),
    ("__init__", "__main__"),
]
"""Rooms from left to right; a room imports from itself and from rooms to its left."""


def imports(path: Path, *, types: bool) -> set[str]:
    """What a file imports of kvcli, in functions too; what it imports for type checking alone if `types`."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
            node.body.clear()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in names if name.startswith("kvcli.")}


def test_rooms_import_only_to_the_left(repo_root: Path) -> None:
    """Integrations are imported by nothing else but `kvcli serve`, and no room is of odds and ends."""
    order = {room: place for place, rooms in enumerate(ROOMS) for room in rooms}
    package = repo_root / "kvcli"
    for path in sorted(package.rglob("*.py")):
        room, name = path.relative_to(package).parts[0].removesuffix(".py"), path.relative_to(repo_root)
        assert path.stem not in ("utils", "helpers", "common")
        assert room in order, f"{room} has no place in ROOMS"
        for other in {name.split(".")[1] for name in imports(path, types=False)} - {room}:
            assert order[other] < order[room], f"{name} imports {other}, which is to its right"
            assert other != "integrations" or name == Path("kvcli/cli/serve.py"), name


def test_nothing_heavy_is_imported() -> None:
    heavy = ("torch", "transformers", "datasets", "lmcache", "sglang", "vllm")
    code = f"import sys, kvcli.cli.app, kvcli.registry; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_patches_nothing() -> None:
    code = (
        "from transformers import AttentionInterface as a; before = set(a().keys());"
        "import kvcli.attention.session, kvcli.calibrate.collect; print(set(a().keys()) == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_no_modules_import_each_other(repo_root: Path) -> None:
    """Neither directly nor through others; imports in functions and for types count."""
    paths = {
        ".".join(path.relative_to(repo_root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (repo_root / "kvcli").rglob("*.py")
    }
    left = {
        module: {name if name in paths else name.rpartition(".")[0] for name in imports(path, types=True)} - {module}
        for module, path in paths.items()
    }
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    assert not left


MAX_LINES = 49_012
MAX_TEST_LINES, MAX_RESEARCH_TEST_LINES = 0.787, 0.35
"""The lines of the package; those of tests for each of the package, and of tests of research for each of research.
Code and cap do not rise in one commit: a feature that needs more deletes first, and who raises the cap does that alone
and says why."""


def test_package_and_tests_keep_their_lines(repo_root: Path) -> None:
    texts = {x: [path.read_text() for path in (repo_root / x).rglob("*.py")] for x in ("kvcli", "research", "tests")}
    of_research = [
        text for text in texts["tests"] if re.search(r"^from (research|laboratory import run)", text, re.MULTILINE)
    ]
    package, research, tests, others = (
        sum(len(text.splitlines()) for text in found) for found in (*texts.values(), of_research)
    )
    assert package <= MAX_LINES, "delete lines"
    assert tests - others <= MAX_TEST_LINES * package, "delete lines of tests"
    assert others <= MAX_RESEARCH_TEST_LINES * research, "delete lines of tests of research"


def test_files_of_tests_have_names_of_their_own(repo_root: Path) -> None:
    """A process that has imported one of two files of a name cannot collect the other one."""
    names = [path.name for path in (repo_root / "tests").glob("**/test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_room_has_fast_tests(repo_root: Path) -> None:
    """Files of tests/support/fast.py exist; a file that is merged into another one gives its place there to it."""
    tests = repo_root / "tests"
    assert [name for name in FAST if not (tests / name).is_file()] == []
    rooms = {path.parent.name for path in tests.glob("*/test_*.py")}
    assert rooms - {Path(name).parent.name for name in FAST} == {"examples", "golden", "kernels", "paged", "sabotage"}
