"""`Strict`: the base of everything that a user can configure, and how its errors are told."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Strict(BaseModel):
    """A frozen record without unknown keys; the string under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


T = TypeVar("T")
Many = Annotated[tuple[T, ...], Field(strict=False)]
"""A tuple that may be written as a list: YAML and JSON have no other."""


ELSEWHERE = {
    "beta": "kl_coef",
    "delta": "dual_clip",
    "epsilon": "clip_range",
    "epsilon_high": "clip_range_high",
    "learning_rate": "lr",
    "loss_type": "algorithm",
    "mask_truncated_completions": "mask_truncated",
    "max_completion_length": "max_tokens",
    "num_generations": "group_size",
    "num_iterations": "ppo_epochs",
    "ref_model_mixup_alpha": "reference_mix",
    "ref_model_sync_steps": "reference_every",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
    "reward_weights": "rewards",
    "scale_rewards": "scale",
}
"""What other projects call a key or a preset of ours."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known name that is meant by, or most like `name`; or nothing.

    >>> nearest("num_generations", ["group_size", "min_lr_ratio"])
    "; did you mean 'group_size'?"
    """
    names = list(known)
    if ELSEWHERE.get(name) in names:
        return f"; did you mean {ELSEWHERE[name]!r}?"
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.55)
    return f"; did you mean {close[0]!r}?" if close else ""


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per mistake: the field's path, what is wrong, the value, the remedy where one is known."""
    found = [dict(e) for e in error.errors(include_url=False)]
    return [line for e in found if not _is_echo(e, found) for line in _explain_one(e, model)]


def _is_echo(error: dict[str, Any], found: list[dict[str, Any]]) -> bool:
    """A list is also called too short when its entries are wrong."""
    loc = error["loc"]
    return error["type"] == "too_short" and any(e["loc"][: len(loc)] == loc for e in found if e is not error)


def _explain_one(error: dict[str, Any], model: type[BaseModel]) -> list[str]:
    path, owner = _walk(error["loc"], model)
    kind, value = error["type"], error.get("input")
    if kind == "extra_forbidden":
        known = sorted(owner.model_fields) if owner is not None else []
        hint = nearest(str(error["loc"][-1]), known)
        return [f"{path}: unknown key{hint}" + ("" if hint else f"; known keys: {', '.join(known)}")]
    if kind == "missing":
        return [f"{path}: required, but not given"]
    message = str(error["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if (
        kind == "value_error"
    ):  # a validator of our own, which names the values itself; it may have found several mistakes
        return [f"{path}: {line}" for line in message.split("\n")]
    return [f"{path}: {message}, got {value!r}"]


def _walk(loc: tuple[str | int, ...], model: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """The dotted path as the user wrote it, and the model that owns its last key.

    In a union, pydantic puts the tag of the chosen member (or its class name) between a field and the keys under it:
    such entries are not keys of the file, and choose the member here.
    """
    path: list[str] = []
    owner: type[BaseModel] | None = model
    members: list[type[BaseModel]] = []
    for entry in loc:
        chosen = [m for m in members if entry in _tags(m)]
        if isinstance(entry, str) and chosen:
            owner, members = chosen[0], []
            continue
        path.append(str(entry))
        if isinstance(entry, int):
            continue
        if len(members) == 1:
            owner = members[0]
        field = owner.model_fields.get(entry) if owner is not None else None
        members = list(_models_in(field.annotation)) if field is not None else []
        if field is None:
            continue
    return ".".join(path), owner


def _tags(model: type[BaseModel]) -> set[str]:
    kind = model.model_fields.get("kind")
    literals = getattr(kind.annotation, "__args__", ()) if kind is not None else ()
    return {model.__name__, *map(str, literals)}


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _models_in(argument)
