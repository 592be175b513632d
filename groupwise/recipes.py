"""Recipe files: YAML in, with overrides; resolved YAML out. Every mistake is told with its path."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from groupwise.config import Recipe
from groupwise.schema import explain


class RecipeError(ValueError):
    """A recipe that cannot be run; `mistakes` has one line per mistake."""

    def __init__(self, source: str, mistakes: Sequence[str]) -> None:
        self.mistakes = list(mistakes)
        super().__init__("\n".join(f"{source}: {m}" for m in mistakes))


class _Loader(yaml.SafeLoader):
    """YAML in which `1e-5` is a number (YAML 1.1 wants `1.0e-5`) and a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply `key.path=value` overrides; stages go by name or number.

    Raises:
        RecipeError: the file is missing, is no YAML, or is no valid recipe; every mistake is named.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(str(path), [f"cannot be read: {getattr(error, 'strerror', None) or error}"]) from error
    return parse_recipe(text, overrides, source=str(path))


def parse_recipe(text: str, overrides: Sequence[str] = (), source: str = "recipe") -> Recipe:
    """The recipe in a YAML text. See `read_recipe`."""
    try:
        data = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise RecipeError(source, [f"is not valid YAML: {error}"]) from error
    if not isinstance(data, dict):
        raise RecipeError(source, [f"a recipe is a mapping of keys to values, got {type(data).__name__}"])
    for override in overrides:
        try:
            _apply_override(data, override)
        except ValueError as error:
            raise RecipeError("override", [f"{override}: {error}"]) from error
    try:
        return Recipe.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise RecipeError(source, [line.removeprefix(": ") for line in explain(error, Recipe)]) from error


def _apply_override(data: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    if not equals:
        raise ValueError("an override is key.path=value")
    *parents, last = path.split(".")
    target: Any = data
    for key in parents:
        target = _child(target, key)
    if isinstance(target, list):
        raise ValueError(f"{last!r} would replace a whole entry of a list; name a key inside it")
    target[last] = yaml.load(value, _Loader)


def _child(target: Any, key: str) -> Any:
    if isinstance(target, list):
        named = [entry for entry in target if isinstance(entry, dict) and entry.get("name") == key]
        if named:
            return named[0]
        if key.isdigit() and int(key) < len(target):
            return target[int(key)]
        names = [str(e.get("name")) for e in target if isinstance(e, dict)]
        raise ValueError(f"no entry {key!r}; there are {', '.join(names)}")
    if not isinstance(target, dict):
        raise ValueError(f"{key!r} is not below a mapping")
    return target.setdefault(key, {})


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every key with the value that is used."""
    data = recipe.model_dump(mode="json")
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
