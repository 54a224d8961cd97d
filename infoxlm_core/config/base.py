"""Base class of all configs: frozen, strict about field names, with one-line error messages."""

import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from infoxlm_core import languages
from infoxlm_core.errors import ConfigError

LARGEST_NUMBER = 2**53 - 1
"""Largest integer in a config. Kubeflow Pipelines passes numbers as doubles, which cannot represent every larger
integer."""
LARGEST_FLOAT = 3.4028234663852886e38
"""Largest float in a config: the largest fp32 number, because training computes in fp32."""


def _check_number(value: Any) -> Any:
    """Reject booleans and strings, which pydantic would convert to numbers, and values beyond fp32."""
    if isinstance(value, str | bool):
        raise PydanticCustomError("number", "Input should be a valid number")
    if isinstance(value, int | float) and LARGEST_FLOAT < abs(value) < math.inf:  # other rules reject infinity
        raise PydanticCustomError("number", "Input should be at most 3.4e38, the largest fp32 number")
    return value


def _check_whole(value: Any) -> Any:
    """Reject booleans and strings, which pydantic would convert to integers, and numbers too large for a double."""
    if isinstance(value, str | bool):
        raise PydanticCustomError("number", "Input should be a valid integer")
    if isinstance(value, int | float) and abs(value) > LARGEST_NUMBER:  # pydantic converts 3e2 to 300
        raise PydanticCustomError("number", "Input should be at most 2^53 - 1")
    return value


def _check_language(code: str) -> str:
    """Reject two-letter codes outside ISO 639-1. Three-letter codes are not checked."""
    if len(code) == 2 and not languages.is_known(code):
        raise PydanticCustomError("language", "Input should be an ISO 639-1 language code, such as de")
    return code


def merge(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the overrides applied. Nested mappings are merged, other values replaced."""
    merged = dict(values)
    for key, override in overrides.items():
        value = merged.get(key)
        if isinstance(value, Mapping) and isinstance(override, Mapping):
            merged[key] = merge(value, override)
        else:
            merged[key] = override
    return merged


def set_by_name(values: Any, name: str, new_value: Any, location: str) -> None:
    """Set a value in nested mappings by its dotted name, such as `optimization.steps`. Create missing mappings.

    Args:
        values: the outermost mapping, as read from a YAML file.
        name: dotted name of the value.
        new_value: the value to set.
        location: where the name was given, for the error message.

    Raises:
        ConfigError: the dotted name leads through a value that is not a mapping.
    """
    *section_names, field_name = name.split(".")
    section = values
    for section_name in section_names:
        section = section.setdefault(section_name, {}) if isinstance(section, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(f"{location}: {'.'.join(section_names)} is not a section")
    section[field_name] = new_value


def layer_number_or(*names: str) -> BeforeValidator:
    """Return a validator that accepts a layer number, such as 8, or one of the names, such as `last`.

    With a union type, pydantic would report a separate error for each alternative.
    """
    layer_number = TypeAdapter(Annotated[Whole, Field(gt=0, le=1000)])

    def validate(value: Any) -> Any:
        if value in names:
            return value
        try:
            return layer_number.validate_python(value)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise PydanticCustomError("layers", f"{reason}, or {' or '.join(names)}") from None

    return BeforeValidator(validate)


Whole = Annotated[int, BeforeValidator(_check_whole)]
PositiveInt = Annotated[Whole, Field(gt=0)]
NonNegativeInt = Annotated[Whole, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_check_number)]
PositiveFloat = Annotated[Number, Field(gt=0)]
Flag = Annotated[bool, Field(strict=True)]
"""Strict boolean: true or false. "yes" and 1 are errors."""
Share = Annotated[Number, Field(ge=0, le=1)]
Weight = Annotated[Number, Field(ge=0, allow_inf_nan=False)]
Source = Annotated[str, Field(min_length=1)]
"""Path or URI of a model or data. It must not be empty: an unset variable would mean the current directory."""
Language = Annotated[str, Field(pattern=r"^[a-z]{2,3}$"), AfterValidator(_check_language)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")]  # used in file names


class StageConfig(BaseModel):
    """Base class of all configs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    added_later: ClassVar[tuple[str, ...]] = ()
    """Fields that are newer than some stored artifacts. Artifact keys omit them at their default values."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Describe each field as in the parent class if the class only gives the field another default."""
        parent_fields: Mapping[str, FieldInfo] = getattr(cls.__base__, "model_fields", {})
        for name, field in cls.model_fields.items():
            if field.description is None and name in parent_fields:
                field.description = parent_fields[name].description

    def result_fields(self) -> dict[str, Any]:
        """Return the fields that affect the result: all except those for saving, logging and probing.

        Artifact keys are digests of these fields. Fields in `added_later` are omitted at their default values, so that
        the keys of older artifacts do not change.
        """
        fields = self.model_dump(mode="json", exclude={"checkpoints", "log_every", "probe"})
        _omit_added_fields(self, fields)
        return fields

    @classmethod
    def parse(cls, values: Mapping[str, Any], section: str = "") -> Self:
        """Validate the fields and return the config.

        Args:
            values: field values, as read from a YAML file.
            section: dotted name of the config within its file, for the error message.

        Raises:
            ConfigError: a field is invalid. The message names the first invalid field, its value and the rule.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_describe_error(cls, error, section)) from None


def _describe_error(config_class: type[StageConfig], error: ValidationError, section: str) -> str:
    """Describe the first invalid field in one line: its name, the rule and its value."""
    errors = error.errors()
    first_names, _ = _follow_location(config_class, errors[0]["loc"])
    first_error, names = errors[0], first_names
    # A field with several possible types has an error for each type. The innermost error is that of the type that the
    # user meant: for a list with an unknown language, it names the language.
    for other_error in errors[1:]:
        other_names, _ = _follow_location(config_class, other_error["loc"])
        if other_names[: len(first_names)] == first_names and len(other_names) > len(names):
            first_error, names = other_error, other_names
    location = first_error["loc"]
    field = ".".join(name for name in (section, *names) if name != "")  # `section` may be empty
    reason = first_error["msg"].removeprefix("Value error, ")
    if first_error["type"] == "extra_forbidden":
        _, innermost_class = _follow_location(config_class, location[:-1])
        reason = f"unknown name; known are {', '.join(sorted(innermost_class.model_fields))}"
    elif first_error["type"] not in ("value_error", "missing"):
        # Our own validators already name the value, and a missing field has none.
        reason += f", not {first_error['input']!r:.120}"
    further_error_count = len(errors) - 1
    further_errors = f" (and {further_error_count} more)" if further_error_count else ""
    return f"{field or config_class.__name__}: {reason}{further_errors}"


def _omit_added_fields(config: StageConfig, values: dict[str, Any]) -> None:
    """Remove fields that are newer than some artifacts (`added_later`) and have default values, also if nested."""
    for name, value in config:
        if name in config.added_later and value == type(config).model_fields[name].default:
            del values[name]
        elif isinstance(value, StageConfig) and name in values:
            _omit_added_fields(value, values[name])
        elif isinstance(value, tuple) and name in values:
            for item, item_values in zip(value, values[name], strict=True):
                if isinstance(item, StageConfig):
                    _omit_added_fields(item, item_values)


def _follow_location(
    config_class: type[BaseModel], location: tuple[str | int, ...]
) -> tuple[list[str], type[BaseModel]]:
    """Return the names on the path to a field, as in the file, and the class of the innermost config on the path.

    Args:
        config_class: class of the outermost config.
        location: path to a field or a nested config as pydantic reports it: field names, list indices and mapping keys.
            After the name of a field with several possible types, it also contains pydantic's name of one of them.
    """
    names = []
    has_alternatives = False  # whether the last field has several possible types
    alternatives: dict[Any, type[BaseModel]] = {}  # those of them that are config classes, by pydantic's names
    for part in location:
        if has_alternatives:
            config_class = alternatives.get(part, config_class)
            has_alternatives = False
            continue
        names.append(str(part))
        field = config_class.model_fields.get(str(part))
        if field is None:  # an index or a key leads to no other class
            continue
        # The annotation is a config class, or contains one or several, such as tuple[CorpusSource, ...].
        arguments = get_args(field.annotation)
        nested_classes = [
            item for item in (field.annotation, *arguments) if isinstance(item, type) and issubclass(item, BaseModel)
        ]
        is_union = get_origin(field.annotation) in (Union, UnionType)
        has_alternatives = is_union and len(set(arguments) - {NoneType}) > 1
        if isinstance(field.discriminator, str):  # the name of the field whose value selects the class
            alternatives = {nested.model_fields[field.discriminator].default: nested for nested in nested_classes}
        elif nested_classes:
            config_class = nested_classes[0]
    return names, config_class
