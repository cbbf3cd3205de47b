"""Option classes: frozen dataclasses that name the nearest known option when given an unknown one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: type[T]) -> type[T]:
    """A frozen dataclass whose constructor refuses unknown options with one clear line."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    plain_init, known = cls.__init__, [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(plain_init)
    def init(self: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
                raise ValueError(f"unknown option {name!r} of {cls.__name__}: {hint}")
        plain_init(self, **given)

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


def refuse_unsupported(instance: Any, names: dict[str, str]) -> None:
    """Raises NotImplementedError for the first of names that is not at its default; the value says what to do."""
    for field in dataclasses.fields(instance):
        if field.name not in names:
            continue
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore
        if getattr(instance, field.name) != default:
            raise NotImplementedError(
                f"{field.name}={getattr(instance, field.name)!r} is not supported yet: {names[field.name]}"
            )
