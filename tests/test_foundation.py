"""Packing, rotation, model specifications and the order of the rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvcli
from kvcli.errors import UnsupportedModelError
from kvcli.packing import pack_bits, pack_planes, packed_size, planes_size, unpack_bits, unpack_planes
from kvcli.rope import Rope, from_pairs, to_pairs
from kvcli.spec import ModelSpec


@settings(max_examples=200, deadline=None)
@given(n_bits=st.integers(1, 16), count=st.integers(1, 40), seed=st.integers(0, 1000))
def test_packing_round_trip_without_waste(n_bits: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**n_bits, (2, 3, count), generator=generator)
    packed = pack_bits(codes, n_bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (2, 3, packed_size(count, n_bits)) == (2, 3, -(-count * n_bits // 8))
    assert torch.equal(unpack_bits(packed, n_bits, count), codes.int())


def test_packing_is_little_endian() -> None:
    assert pack_bits(torch.tensor([0xABC, 0x123]), 12).tolist() == [0xBC, 0x3A, 0x12]
    assert pack_bits(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1]), 1).tolist() == [1, 1]


@pytest.mark.parametrize(("n_bits", "count"), [(1, 80), (2, 128), (4, 96), (8, 64), (2, 33), (1, 5)])
def test_planes_round_trip(n_bits: int, count: int) -> None:
    codes = torch.randint(0, 2**n_bits, (2, 3, count))
    packed = pack_planes(codes, n_bits)
    assert packed.shape[-1] == planes_size(count, n_bits) <= packed_size(count, n_bits) + 1
    assert torch.equal(unpack_planes(packed, n_bits, count), codes.int())


def test_planes_are_far_apart_in_a_word() -> None:
    words = pack_planes(torch.tensor([3, 0, 1, 2] + [0] * 12), 2).view(torch.int16)
    assert words.tolist() == [3 | 1 << 2, 0 | 2 << 2]


@pytest.mark.parametrize("n_bits", [0, 17])
def test_packing_refuses_other_widths(n_bits: int) -> None:
    with pytest.raises(ValueError, match="n_bits"):
        pack_bits(torch.zeros(3, dtype=torch.long), n_bits)


def test_rotation_equals_transformers_bit_for_bit() -> None:
    model = make_model("llama")
    x, positions = torch.randn(2, 4, 9, 16), torch.randint(0, 500, (2, 9))
    cos, sin = model.model.rotary_emb(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    rotation = Rope(model.model.rotary_emb).rotation(positions, torch.float32)
    assert torch.equal(rotation.apply(x), expected)
    assert torch.allclose(rotation.unapply(rotation.apply(x)), x, atol=1e-5)


def test_unapply_undoes_yarn_scaling() -> None:
    model = make_model(
        "llama",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
        },
    )
    rotation = Rope(model.model.rotary_emb).rotation(torch.arange(300)[None], torch.float32)
    assert not torch.allclose(rotation.cos**2 + rotation.sin**2, torch.ones(()))
    x = torch.randn(1, 2, 300, 16)
    assert torch.allclose(rotation.unapply(rotation.apply(x)), x, atol=1e-4)


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_pairs_are_what_rope_rotates(rotary_dim: int) -> None:
    x = torch.randn(3, 16)
    pairs = to_pairs(x, rotary_dim)
    assert torch.equal(from_pairs(pairs, rotary_dim), x)
    assert torch.equal(pairs[:, 1, 0], x[:, 1])
    assert torch.equal(pairs[:, 1, 1], x[:, 1 + rotary_dim // 2])


def test_spec_reads_every_family(any_model: Any) -> None:
    spec = ModelSpec.from_config(any_model.config)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (3, 4, 2, 16)
    assert spec.kv_dim == 32
    assert spec.num_kv_groups == 2
    assert spec.fp16_bytes_per_token() == 3 * 2 * 32 * 2
    assert ModelSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("mamba", {}, "linear_attention in layers 0, 1"),
        ("mistral", {"sliding_window": 64}, "sliding_attention in layers 0, 1"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "sliding_attention"),
    ],
)
def test_unsupported_models_are_refused_by_name(family: str, changes: dict[str, Any], named: str) -> None:
    config = AutoConfig.for_model(family, num_hidden_layers=2, **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        ModelSpec.from_config(config)


ROOMS = [
    ("_version", "errors", "packing", "progress"),
    ("builtin_models", "machine", "ranks", "registry", "storage"),
    ("spec", "wheels"),
    ("fingerprint", "rope"),
    ("checkpoint", "hub"),
    ("builtin_copy",),
    ("seam",),
    ("models",),
    ("options", "paths", "sizes", "tables"),
    ("suite",),
    ("prompts",),
    ("rendered",),
    ("kernels",),
    ("methods",),
    ("calibrate",),
    ("artifact",),
    ("fit",),
    ("cache",),
    ("attention",),
    ("contexts",),
    ("compress", "generate"),
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
    ".": 4220,
    "artifact": 510,
    "attention": 2250,
    "bench": 3120,
    "cache": 3280,
    "calibrate": 1690,
    "cli": 3700,
    "contexts": 990,
    "eval": 2660,
    "integrations": 870,
    "kernels": 840,
    "methods": 8600,
    "plan": 660,
    "seam": 1820,
    "storage": 720,
}
"""Lines that a room of the package may have, `.` for the files at its root. A feature that needs more raises its room's
number in the same change and says why in the commit message; a change that deletes lowers it."""


def test_every_room_keeps_its_budget_of_lines() -> None:
    package = Path(kvcli.__file__).parent
    lines = dict.fromkeys(BUDGET, 0)
    for path in package.rglob("*.py"):
        *rooms, _ = path.relative_to(package).parts
        lines[rooms[0] if rooms else "."] += len(path.read_text().splitlines())
    assert {room: count for room, count in lines.items() if count > BUDGET[room]} == {}
