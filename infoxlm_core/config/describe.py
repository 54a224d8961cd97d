"""Descriptions of config fields for the console and the documentation, taken from the docstrings under the fields."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from infoxlm_core.config.base import StageConfig

_PLAIN = {bool: "true or false", int: "integer", float: "number", str: "text", NoneType: "null", Any: "anything"}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "length >="}


@dataclass(frozen=True)
class Setting:
    """One setting of a YAML file; its name is dotted, as in `--set`."""

    name: str
    type: str
    default: str
    meaning: str


def settings(kind: type[StageConfig], prefix: str = "", parent: StageConfig | None = None) -> Iterator[Setting]:
    """Yield every setting of a config and of the configs inside it.

    Args:
        kind: class of the config.
        prefix: what precedes every name, with its dot.
        parent: the instance whose values are the defaults; None takes the defaults of the class.
    """
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True) if parent is None else getattr(parent, name)
        inner, suffix = _config_in(field.annotation)
        if inner is None or field.description:
            default_text = "required" if default is PydanticUndefined else json.dumps(to_jsonable_python(default))
            yield Setting(prefix + name, _type(field), default_text, " ".join((field.description or "").split()))
        if inner is not None:
            instance = default if isinstance(default, StageConfig) else None
            yield from settings(inner, f"{prefix}{name}{suffix}.", instance)


def as_text(listed: Iterable[Setting]) -> str:
    """Return two lines for each setting, for the console."""
    lines = [f"{setting.name}: {setting.default}  ({setting.type})\n    {setting.meaning}" for setting in listed]
    return "\n".join(lines)


def as_markdown(kinds: Mapping[str, type[StageConfig]]) -> str:
    """Return a page with a table for each config."""
    parts = []
    for title, kind in kinds.items():
        parts += [f"## {title}", "", " ".join((kind.__doc__ or "").split()), ""]
        parts += ["| name | value | default | meaning |", "|---|---|---|---|"]
        for setting in settings(kind):
            cells = (f"`{setting.name}`", setting.type, f"`{setting.default}`", setting.meaning)
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("")
    return "\n".join(parts)


def _config_in(annotation: Any) -> tuple[type[StageConfig] | None, str]:
    """Return the config class inside an annotation, and the suffix of the field's name: empty, `[]` or `.NAME`."""
    if isinstance(annotation, type) and issubclass(annotation, StageConfig):
        return annotation, ""
    if get_origin(annotation) in (tuple, dict):
        inner, _ = _config_in(get_args(annotation)[-1 if get_origin(annotation) is dict else 0])
        return inner, "[]" if get_origin(annotation) is tuple else ".NAME"
    return None, ""


def _type(field: FieldInfo) -> str:
    return _words(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return ", ".join([_words(arguments[0]), *_bounds(arguments[1:])])
    if origin is Literal:
        return " · ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_words(member) for member in arguments))
    if origin is tuple:
        return f"list of {_words(arguments[0])}" if arguments[-1] is ... else f"[{', '.join(map(_words, arguments))}]"
    if origin is list:
        return f"list of {_words(arguments[0])}"
    if origin is dict:
        return f"mapping of {_words(arguments[0])} to {_words(arguments[1])}"
    return _PLAIN.get(annotation, "mapping")  # all other annotations are configs


def _bounds(metadata: Iterable[Any]) -> list[str]:
    """Return the bounds among an annotation's metadata, such as `>= 0`."""
    constraints: list[Any] = []
    for item in metadata:
        constraints += [item, *getattr(item, "metadata", ())]
    bounds = []
    for constraint in constraints:
        for name, sign in _BOUNDS.items():
            if hasattr(constraint, name):
                bounds.append(f"{sign} {getattr(constraint, name)}")
    return bounds
