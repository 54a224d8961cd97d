"""What each field of a config means, read from the docstrings under the fields: for the console and for a page."""

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
    """One value that a YAML file may set; `name` is dotted, as `--set` takes it."""

    name: str
    type: str
    default: str
    meaning: str


def settings(kind: type[StageConfig], prefix: str = "", parent: StageConfig | None = None) -> Iterator[Setting]:
    """List every value of a config, those of configs inside it too, with the defaults that hold at that place: those of
    `parent`, an instance that stands as a default somewhere, if there is one. `prefix`: of all names, with its dot."""
    for name, field in kind.model_fields.items():
        default = field.get_default(call_default_factory=True) if parent is None else getattr(parent, name)
        inner, suffix = _config_in(field.annotation)
        if inner is None or field.description:
            shown = "required" if default is PydanticUndefined else json.dumps(to_jsonable_python(default))
            yield Setting(prefix + name, _type(field), shown, " ".join((field.description or "").split()))
        if inner is not None:
            held = default if isinstance(default, StageConfig) else None
            yield from settings(inner, f"{prefix}{name}{suffix}.", held)


def as_text(found: Iterable[Setting]) -> str:
    """Two lines a setting, for the console."""
    return "\n".join(f"{one.name}: {one.default}  ({one.type})\n    {one.meaning}" for one in found)


def as_markdown(kinds: Mapping[str, type[StageConfig]]) -> str:
    """A page with a table for each config."""
    parts = []
    for title, kind in kinds.items():
        parts += [f"## {title}", "", " ".join((kind.__doc__ or "").split()), ""]
        parts += ["| name | value | default | meaning |", "|---|---|---|---|"]
        for one in settings(kind):
            cells = (f"`{one.name}`", one.type, f"`{one.default}`", one.meaning)
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        parts.append("")
    return "\n".join(parts)


def _config_in(annotation: Any) -> tuple[type[StageConfig] | None, str]:
    """The one config that an annotation holds, and how its place is written: nothing, `[]` or `.NAME`."""
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
        limits = [part for one in arguments[1:] for part in (one, *getattr(one, "metadata", ()))]
        bounds = [
            f"{sign} {getattr(one, name)}" for one in limits for name, sign in _BOUNDS.items() if hasattr(one, name)
        ]
        return ", ".join([_words(arguments[0]), *bounds])
    if origin is Literal:
        return " · ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_words(one) for one in arguments))
    if origin is tuple:
        return f"list of {_words(arguments[0])}" if arguments[-1] is ... else f"[{', '.join(map(_words, arguments))}]"
    if origin is list:
        return f"list of {_words(arguments[0])}"
    if origin is dict:
        return f"mapping of {_words(arguments[0])} to {_words(arguments[1])}"
    return _PLAIN.get(annotation, "mapping")  # what is left is a config
