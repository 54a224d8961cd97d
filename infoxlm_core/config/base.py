"""The base class of all configs: frozen, strict about field names, with one-line error messages."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from infoxlm_core import languages
from infoxlm_core.errors import ConfigError

LARGEST_NUMBER = 2**53 - 1
"""Kubeflow Pipelines passes numbers as doubles, which cannot represent all larger integers."""
LARGEST_FLOAT = 3.4028234663852886e38
"""The largest fp32 number; training computes in fp32."""


def _number(value: Any) -> Any:
    """Raise an error for values that pydantic would convert, such as `true` and "300", and for values beyond fp32."""
    if isinstance(value, str | bool):
        raise PydanticCustomError("number", "Input should be a valid number")
    if isinstance(value, int | float) and LARGEST_FLOAT < abs(value) < math.inf:
        raise PydanticCustomError("number", "Input should be at most 3.4e38, the largest number of fp32")
    return value


def _whole(value: Any) -> Any:
    """Raise an error for values that pydantic would convert to an integer, and for integers beyond a double."""
    if isinstance(value, str | bool):
        raise PydanticCustomError("number", "Input should be a valid integer")
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise PydanticCustomError("number", "Input should be at most 2^53 - 1")
    return value


def _language(code: str) -> str:
    """Raise an error for two letters that are not an ISO 639-1 code. Three-letter codes are not checked."""
    if len(code) == 2 and not languages.is_known(code):
        raise PydanticCustomError("language", "Input should be an ISO 639-1 language code, such as de")
    return code


Whole = Annotated[int, BeforeValidator(_whole)]
PositiveInt = Annotated[Whole, Field(gt=0)]
NonNegativeInt = Annotated[Whole, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_number)]
PositiveFloat = Annotated[Number, Field(gt=0)]
Flag = Annotated[bool, Field(strict=True)]
"""true or false; "yes" and 1 are errors."""
Share = Annotated[Number, Field(ge=0, le=1)]
Weight = Annotated[Number, Field(ge=0, allow_inf_nan=False)]
Source = Annotated[str, Field(min_length=1)]
"""Path or URI of a model or data. It must not be empty: an unset variable would mean the current folder."""
Language = Annotated[str, Field(pattern=r"^[a-z]{2,3}$"), AfterValidator(_language)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")]  # becomes a part of file names


class StageConfig(BaseModel):
    """Base class of all configs."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def result_fields(self) -> dict[str, Any]:
        """Return the fields that affect the result, that is, all except saving, logging and probing."""
        return self.model_dump(mode="json", exclude={"checkpoints", "log_every", "probe"})

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Return the validated config.

        Args:
            values: the fields, as read from a YAML file.
            where: dotted name of the section, which precedes the field's name in errors.

        Raises:
            ConfigError: a field is invalid; the message names the first one, its value and the rule.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(name) for name in (*where.split("."), *first["loc"]) if name != "")
            more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            if first["type"] == "extra_forbidden":
                valid_names = ", ".join(sorted(_fields_at(cls, first["loc"][:-1])))
                raise ConfigError(f"{field}: unknown name; known are {valid_names}{more}") from None
            reason = first["msg"].removeprefix("Value error, ")
            value = "" if first["type"] == "value_error" else f", not {first['input']!r:.120}"
            raise ConfigError(f"{field or cls.__name__}: {reason}{value}{more}") from None


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Return the field names of the config at a location inside another config."""
    for part in location:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        if field is None:
            continue
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                model = kind
                break
    return list(model.model_fields)
