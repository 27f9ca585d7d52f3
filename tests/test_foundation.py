"""The order of the rooms, what an import does, and the budget of lines."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from fast import FAST

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
    ("recipe",),
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
    ("chat", "document"),
    ("serve",),
    ("eval",),
    ("bench",),
    ("plan",),
    ("tune",),
    ("integrations",),
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
    """Integrations are imported by nothing else but `kvcli serve --continuous`, and no room is of odds and ends."""
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
    heavy = ("torch", "transformers", "datasets", "lmcache")
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


BUDGET = {
    ".": 4106,  # tables as Markdown
    "artifact": 398,
    "attention": 2540,  # codecs of a model that is not loaded by transformers
    "bench": 3151,  # attention of other libraries as rows; `startup`, `chunks` and `serve`
    "cache": 2740,  # headers of files alone; snapshots joined to a batch; the same offsets are observed
    "calibrate": 1424,  # blocks of logits by vocabulary
    "cli": 4280,  # report, inspect and diff; ask, serve, chat with a server, warmup and doctor; tune
    "contexts": 860,  # contexts that were read alike; used elsewhere than from the store
    "eval": 2918,  # rows without gradients, options that differ by name
    "integrations": 2446,  # the backend of vLLM; pages that both engines share
    "kernels": 974,  # where tiles of tokens lie in pages
    "methods": 10527,  # codes in pages, read by a block table; KLT; Block-GTQ and KVarN as rivals
    "plan": 558,  # bits by layer; from which length they are smaller
    "report": 900,  # tables, of which docs had a third; charts; what files hold; records of others
    "serve": 1468,  # a server of the OpenAI API
    "seam": 1592,  # rotations by constants return at once
    "storage": 636,
}
"""Lines that a room of the package may have, `.` for the files at its root. A feature that needs more raises its room's
number in the same change and says why in the commit message; a change that deletes lowers it."""


def test_every_room_keeps_its_budget_of_lines(repo_root: Path) -> None:
    package = repo_root / "kvcli"
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
    assert rooms - {Path(name).parent.name for name in FAST} == {
        "examples",
        "golden",
        "integrations",
        "kernels",
        "sabotage",
    }
