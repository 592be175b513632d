"""Dependencies point one way: a module imports only from its own package and from the layers below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import groupwise

ROOT = Path(groupwise.__file__).parent

LAYERS = (
    ("types", "schema"),
    ("chat", "algorithms", "batch"),
    ("tasks", "rewards", "sandbox"),
    ("config",),
    ("recipes", "run", "progress", "attention", "tiny"),
    ("model",),
    ("engines", "optim", "metrics", "curriculum", "experience"),
    ("rollout", "critic", "reference"),
    ("trainer",),
    ("stages",),
    ("pipeline",),
    ("cli",),
    ("__init__", "__main__"),
)
"""Every unit of the package, lowest layer first. A unit is a module, or a package with all its modules."""

HEIGHT = {unit: height for height, layer in enumerate(LAYERS) for unit in layer}

TORCH_FREE = (
    "types",
    "schema",
    "chat",
    "algorithms.advantages",
    "algorithms.weights",
    "algorithms.presets",
    "algorithms.estimates",
    "tasks",
    "rewards",
    "config",
    "recipes",
    "run",
    "progress",
    "cli",
)


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def unit_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_units(source: str) -> set[str]:
    """Units of the package that a source text imports anywhere, inside functions and TYPE_CHECKING blocks included."""
    units = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "groupwise":
                unit = rest.split(".")[0]
                units.add(unit if unit in HEIGHT else "__init__")
    return units


def test_the_reader_of_imports_sees_all_forms() -> None:
    source = (
        "import groupwise.batch\nimport torch\nfrom groupwise import pipeline, Prompt\n"
        "def f():\n    from groupwise.engines.local import LocalEngine\n"
    )
    assert imported_units(source) == {"batch", "pipeline", "__init__", "engines"}


def test_every_module_has_its_layer() -> None:
    assert {unit_of(path) for path in modules()} <= set(HEIGHT)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    unit = unit_of(path)
    others = imported_units(path.read_text(encoding="utf-8")) - {unit}
    upwards = {other for other in others if HEIGHT[other] >= HEIGHT[unit]}
    assert not upwards, f"{path.relative_to(ROOT)} imports {sorted(upwards)}, which is not below it"


def test_what_needs_no_torch_does_not_import_it() -> None:
    """One process imports them all, lowest first, and names the first one that brings torch in."""
    program = (
        "import importlib, sys\n"
        "import groupwise\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(f'groupwise.{name}')\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'groupwise.{name} imports {sorted(heavy)}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *TORCH_FREE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_the_model_knows_model_classes() -> None:
    """`from_pretrained` and the Auto classes of models are used in one file."""
    users = {
        str(path.relative_to(ROOT))
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] == "transformers"
        and any(alias.name.startswith("AutoModel") for alias in node.names)
    }
    assert users == {"model.py"}


def test_public_names_resolve() -> None:
    assert sorted(groupwise.__all__) == sorted(groupwise._HOMES)
    for name in groupwise.__all__:
        assert getattr(groupwise, name).__module__.startswith("groupwise."), name
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrianer'"):
        _ = groupwise.GRPOTrianer
