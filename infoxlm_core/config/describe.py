"""Describe config fields, from their types and docstrings, for the console and the documentation."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from infoxlm_core.config.base import StageConfig

_TYPE_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", NoneType: "null", Any: "anything"}
_BOUND_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "min_length": "length >="}


@dataclass(frozen=True)
class Setting:
    """One setting of a YAML file. Its name is dotted, as in `--set`."""

    name: str
    type: str
    default: str
    meaning: str


def list_settings(config_class: type[StageConfig], prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of a config and its nested configs.

    Args:
        config_class: class of the config.
        prefix: dotted name of the config's section with a final dot, or an empty string.
    """
    for name, field in config_class.model_fields.items():
        inner_config, suffix = _find_inner_config(field.annotation)
        if inner_config is None or field.description:  # without a description, only its fields are listed
            default = field.get_default(call_default_factory=True)
            default_text = "required" if default is PydanticUndefined else json.dumps(to_jsonable_python(default))
            yield Setting(prefix + name, _describe_type(field), default_text, _join_lines(field.description))
        if inner_config is not None:
            yield from list_settings(inner_config, f"{prefix}{name}{suffix}.")


def format_settings(settings: Iterable[Setting]) -> str:
    """Format settings for the console, with two lines for each setting."""
    lines = [f"{setting.name}: {setting.default}  ({setting.type})\n    {setting.meaning}" for setting in settings]
    return "\n".join(lines)


def format_tables(config_classes: Mapping[str, type[StageConfig]]) -> str:
    """Return a Markdown table of settings for each config.

    Args:
        config_classes: mapping from table heading to config class.
    """
    lines = []
    for title, config_class in config_classes.items():
        lines += [f"## {title}", "", _join_lines(config_class.__doc__), ""]
        lines += ["| name | value | default | meaning |", "|---|---|---|---|"]
        for setting in list_settings(config_class):
            cells = (f"`{setting.name}`", setting.type, f"`{setting.default}`", setting.meaning)
            row = " | ".join(cell.replace("|", "\\|") for cell in cells)  # an unescaped | would start a new cell
            lines.append(f"| {row} |")
        lines.append("")
    return "\n".join(lines)


def _join_lines(docstring: str | None) -> str:
    return " ".join((docstring or "").split())


def _find_inner_config(annotation: Any) -> tuple[type[StageConfig] | None, str]:
    """Return the config class in a field's annotation, or None, and the suffix for the field's dotted name.

    The suffix is `[]` for configs in a tuple, and `.NAME` for configs in a mapping.
    """
    if isinstance(annotation, type) and issubclass(annotation, StageConfig):
        return annotation, ""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType) and arguments[-1] is NoneType:  # an optional config
        return _find_inner_config(arguments[0])
    if origin is tuple:
        return _find_inner_config(arguments[0])[0], "[]"
    if origin is dict:
        return _find_inner_config(arguments[-1])[0], ".NAME"
    return None, ""


def _describe_type(field: FieldInfo) -> str:
    """Describe the values that a field accepts, such as `integer, >= 0`."""
    if not field.metadata:
        return _describe_annotation(field.annotation)
    return _describe_annotation(Annotated[field.annotation, *field.metadata])


def _describe_annotation(annotation: Any) -> str:
    """Describe a type annotation in words."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return ", ".join([_describe_annotation(arguments[0]), *_describe_bounds(arguments[1:])])
    if origin is Literal:
        return " · ".join(f"`{value}`" for value in arguments)
    types = [_describe_annotation(argument) for argument in arguments if argument is not ...]
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(types))  # several members may have the same description
    if origin is tuple and arguments[-1] is not ...:
        return f"[{', '.join(types)}]"
    if origin in (tuple, list):
        return f"list of {types[0]}"
    if origin is dict:
        return f"mapping of {types[0]} to {types[1]}"
    return _TYPE_NAMES.get(annotation, "mapping")  # every other annotation is a config class


def _describe_bounds(metadata: Iterable[Any]) -> list[str]:
    """Describe the bounds in an annotation's metadata, such as `>= 0`."""
    constraints: list[Any] = []
    for item in metadata:
        constraints.append(item)
        constraints += getattr(item, "metadata", ())  # pydantic's Field stores its bounds in its own metadata
    bounds = []
    for constraint in constraints:
        for name, sign in _BOUND_SIGNS.items():
            if hasattr(constraint, name):
                bounds.append(f"{sign} {getattr(constraint, name)}")
    return bounds
