"""What all configs share: frozen, strict about names, wrong values named in one line."""

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
"""Kubeflow Pipelines hands numbers on as doubles: a larger whole one would arrive as another."""
LARGEST_FLOAT = 3.4028234663852886e38
"""Of fp32, in which a training computes: PyTorch does not take a larger one."""


def _number(value: Any) -> Any:
    """Refuse what would be bent into a number: `true` and "300"; and what fp32 cannot hold."""
    if isinstance(value, str | bool):
        raise PydanticCustomError("number", "Input should be a valid number")
    if isinstance(value, int | float) and LARGEST_FLOAT < abs(value) < math.inf:
        raise PydanticCustomError("number", "Input should be at most 3.4e38, the largest number of fp32")
    return value


def _whole(value: Any) -> Any:
    """The same of whole numbers, and refuse those that are larger than any."""
    if isinstance(value, str | bool):
        raise PydanticCustomError("number", "Input should be a valid integer")
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise PydanticCustomError("number", "Input should be at most 2^53 - 1")
    return value


def _language(code: str) -> str:
    """Refuse two letters that name no language; of three letters there are thousands of codes."""
    if len(code) == 2 and not languages.is_known(code):
        raise PydanticCustomError("language", "Input should be a language's code in ISO 639-1, such as de")
    return code


Whole = Annotated[int, BeforeValidator(_whole)]
PositiveInt = Annotated[Whole, Field(gt=0)]
NonNegativeInt = Annotated[Whole, Field(ge=0)]
Number = Annotated[float, BeforeValidator(_number)]
PositiveFloat = Annotated[Number, Field(gt=0)]
Flag = Annotated[bool, Field(strict=True)]
"""Neither "yes" nor 1 is one."""
Share = Annotated[Number, Field(ge=0, le=1)]
Weight = Annotated[Number, Field(ge=0, allow_inf_nan=False)]
Source = Annotated[str, Field(min_length=1)]
"""Where a model or data are. An empty one, of a variable that is not set, would be none, or the folder one is in."""
Language = Annotated[str, Field(pattern=r"^[a-z]{2,3}$"), AfterValidator(_language)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$")]  # it becomes part of a file's


class StageConfig(BaseModel):
    """Frozen, strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def result_fields(self) -> dict[str, Any]:
        """What decides the result, as plain values: everything but how often to save, log and probe."""
        return self.model_dump(mode="json", exclude={"checkpoints", "log_every", "probe"})

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = "") -> Self:
        """Check a mapping; raise ConfigError with one line that names the first wrong field, its value and the rule."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in (*where.split("."), *first["loc"]) if part != "")
            more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            if first["type"] == "extra_forbidden":
                known = ", ".join(sorted(_fields_at(cls, first["loc"][:-1])))
                raise ConfigError(f"{field}: unknown name; known are {known}{more}") from None
            reason = first["msg"].removeprefix("Value error, ")
            found = "" if first["type"] == "value_error" else f", not {first['input']!r:.120}"
            raise ConfigError(f"{field or cls.__name__}: {reason}{found}{more}") from None


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the config that stands at a location inside another."""
    for part in location:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        if field is None:
            continue
        found = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((a for a in found if isinstance(a, type) and issubclass(a, BaseModel)), model)
    return list(model.model_fields)
