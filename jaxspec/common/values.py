"""Option classes and checks of their values.

An option class is a frozen dataclass whose fields are options. For an unknown option its constructor raises an error
that names the nearest known option, or all of them. A check raises UserError with one line that names the value and the
limit.

numpy is imported inside functions, because the command line imports this module for --help, which has to be fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import numbers
import operator
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, dataclass_transform

from jaxspec.common.errors import UnsupportedError, UserError, quoted

T = TypeVar("T")
LARGEST = 2**31 - 1  # largest int32, the type of counts and ids on devices
LARGEST_ON_HOST = 2**63 - 1  # largest int64


def option(text: str, *, default: Any = dataclasses.MISSING, factory: Any = dataclasses.MISSING) -> Any:
    """Declare a field of an option class. text: description of the option; `--help` shows its first sentence."""
    return dataclasses.field(default=default, default_factory=factory, metadata={"text": text})


def documented(cls: type[T]) -> type[T]:
    """Add the descriptions of a dataclass's options to its docstring, before the section Raises."""
    entries = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if "text" in field.metadata:
            entry = f"{field.name}: {field.metadata['text']}"
            entries.append(textwrap.fill(entry, 120, initial_indent="  ", subsequent_indent="    "))
    head, raises, errors = inspect.cleandoc(cls.__doc__ or "").partition("Raises:")
    described = "\n".join([head.rstrip(), "", "Args:", *entries])
    cls.__doc__ = f"{described}\n\n{raises}{errors}" if raises else described
    return cls


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
def options(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass of options. Its constructor raises UserError for an unknown option."""
    cls = documented(dataclasses.dataclass(frozen=True, kw_only=True)(cls))
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    plain_init = cls.__init__

    @functools.wraps(plain_init)
    def init(self: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise unknown(name, cls.__name__, known)
        plain_init(self, **given)

    cls.__init__ = init  # type: ignore[method-assign]
    return cls


# vLLM's name of an option -> jaxspec's name
VLLM = {"block_size": "page_size", "max_num_batched_tokens": "prefill_chunk"}


def unknown(name: str, what: str, known: Sequence[str], word: str = "option") -> UserError:
    """Return the error for an unknown name. Its message gives the nearest known name, or all if none is near.

    what: description of the thing that has no such name, for the message.
    word: what the name is a name of, such as "option", for the message.
    """
    near = [VLLM[name]] if VLLM.get(name) in known else difflib.get_close_matches(name[:80], known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]!r}?" if near else f"known {word}s: {', '.join(known)}"
    return UserError(f"unknown {word} {quoted(name)} of {what}: {hint}")


def flag_of(name: str) -> str:
    """Return the command-line flag of an option, such as "--dtype" for "dtype"."""
    return "--" + name.replace("_", "-")


def is_bool(value: Any) -> bool:
    """Return whether the value is of Python's or numpy's type bool."""
    import numpy as np

    return isinstance(value, bool | np.bool_)


def whole(name: str, value: Any, least: int, most: int = LARGEST, *, hint: str = "") -> int:
    """Return the value of an option as an int. Raise UserError unless it is a whole number from least to most.

    name: name of the option, for the message.
    hint: text to add at the end of the message.
    """
    try:
        if is_bool(value):
            raise TypeError
        found = operator.index(value)
    except TypeError:
        raise UserError(f"{name}={quoted(value)} must be a whole number{hint}") from None
    if found < least:
        raise UserError(f"{name}={quoted(found, 40)} is below {least}{hint}")
    if found > most:
        raise UserError(f"{name}={quoted(found, 40)} is above {most}{hint}")
    return found


def number(name: str, value: Any) -> float:
    """Return the value of the option `name` as a float. Raise UserError unless it is a number."""
    import numpy as np

    scalar = isinstance(value, numbers.Real) or (isinstance(value, np.ndarray) and value.ndim == 0)
    try:
        if not scalar or is_bool(value):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{name}={quoted(value)} must be a number") from None


def flag(name: str, value: Any) -> bool:
    """Return the value of the option `name` as a bool. Raise UserError unless it is True or False."""
    if not is_bool(value):
        raise UserError(f"{name}={quoted(value)} must be True or False")
    return bool(value)


def ids(name: str, values: Any) -> tuple[int, ...]:
    """Return token ids as a tuple of ints. Raise UserError unless they are whole numbers of at most 32 bits.

    name: name of the ids, for the message.
    """
    if isinstance(values, str | bytes | bytearray | memoryview | Mapping) or not isinstance(values, Iterable):
        raise UserError(f"{name}={quoted(values)} must be a list of token ids")
    listed: tuple[Any, ...] = tuple(values)
    if set(map(type, listed)) <= {int} and (not listed or -LARGEST <= min(listed) <= max(listed) <= LARGEST):
        return listed  # this fast path matters because prompts are long and are checked several times
    return tuple(whole(name, i, -LARGEST) for i in listed)


def strings(name: str, value: Any) -> tuple[str, ...]:
    """Return one string, or several, as a tuple. Raise UserError for an empty string or another type.

    name: name of the option, for the message.
    """
    listed = (value,) if isinstance(value, str | Mapping) or not isinstance(value, Iterable) else tuple(value)
    if any(not isinstance(s, str) or not s for s in listed):
        raise UserError(f"{name}={quoted(value)} must hold non-empty strings")
    return listed


def refuse_unsupported(instance: Any, names: dict[str, str]) -> None:
    """Raise UnsupportedError for the first field named in `names` that does not have its default value.

    instance: the dataclass instance whose fields are checked.
    names: names of the fields to check, each with the remedy for the message.
    """
    for field in dataclasses.fields(instance):
        if field.name not in names:
            continue
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore
        if getattr(instance, field.name) != default:
            raise UnsupportedError(
                f"{field.name}={getattr(instance, field.name)!r} is not supported yet: {names[field.name]}"
            )


def check_counts(config: Any, most: Mapping[str, int]) -> None:
    """Check the fields of an options dataclass that are counts, and convert them to int.

    most: names of these fields, each with its largest allowed value.

    Raises: UserError unless a value is a whole number from 1 to its limit. None is allowed where it is the default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, limit in most.items():
        value = getattr(config, name)
        if value is not None or defaults[name] is not None:
            object.__setattr__(config, name, whole(name, value, 1, limit))


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise UserError unless the value of the option `name` is one of `allowed`."""
    if value not in allowed:
        raise UserError(f"{name}={value!r} is unknown: use one of {', '.join(allowed)}")
