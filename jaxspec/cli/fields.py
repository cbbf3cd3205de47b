"""A command's options made from the fields of an option class: name, type, default and help stand there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from jaxspec.common.errors import UserError

FIELD = inspect.Parameter.empty  # what the field has


@dataclasses.dataclass(frozen=True)
class Own:
    """What a command has other than the field.

    flags: option names, such as "-k"; those of the field's name where there are none.
    kind: the option's type.
    default: the option's; None leaves the field at its own.
    help, metavar: what --help shows.
    """

    flags: tuple[str, ...] = ()
    kind: Any = FIELD
    default: Any = FIELD
    help: str | None = None
    metavar: str | None = None


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of an option class that a command offers, as the annotation of a parameter: Annotated[dict[str, Any],
    Fields(...)]. The command gets a dict of them, of which what was left at None is missing.

    also: names that refusals have for some of these fields, with the field that each of them is here.
    """

    cls: type
    names: Sequence[str]
    own: Mapping[str, Own] = dataclasses.field(default_factory=dict)
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def parameters(self) -> Iterator[inspect.Parameter]:
        """What typer is shown in its place."""
        kinds, helps = typing.get_type_hints(self.cls), sentences(self.cls)
        fields = {field.name: field for field in dataclasses.fields(self.cls)}
        for name in self.names:
            own = self.own.get(name, Own())
            kept = fields[name].default
            kept = FIELD if kept is dataclasses.MISSING else kept
            if own.kind is str and isinstance(kept, tuple):  # several values, with commas between them
                kept = ",".join(map(str, kept)) or None
            default = kept if own.default is FIELD else own.default
            text = own.help or helps.get(name, "")
            if default is None and not own.help and kept not in (None, FIELD, ()):  # --help would not show it
                text = f"{text.removesuffix('.')}; {kept}."
            flags = own.flags or (("--" + name.replace("_", "-"),) if default is False else ())
            option = typer.Option(*flags, help=text, metavar=own.metavar)
            kind = kinds[name] if own.kind is FIELD else own.kind
            kind = kind | None if default is None else kind
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )

    def taken(self, given: dict[str, Any]) -> dict[str, Any]:
        """Takes the fields out of what typer found."""
        found = {name: given.pop(name) for name in self.names}
        return {name: value for name, value in found.items() if value is not None}


def as_typer_takes_it(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option for each of its Fields' fields."""
    groups: dict[str, Fields] = {}
    parameters: list[inspect.Parameter] = []
    also: dict[str, str] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        fields = [m for m in getattr(parameter.annotation, "__metadata__", ()) if isinstance(m, Fields)]
        if fields:
            (groups[parameter.name],) = fields
            also |= fields[0].also
            parameters.extend(fields[0].parameters())
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    known = dict(flags(parameters))
    known |= {name: known[field] for name, field in also.items()}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        with spoken(known):
            command(**{name: fields.taken(given) for name, fields in groups.items()}, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def flags(parameters: Sequence[inspect.Parameter]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, its longest flag and, of a switch, the one that turns it off) of each option."""
    for parameter in parameters:
        for option in parameter.annotation.__metadata__:
            if isinstance(option, typer.models.OptionInfo):
                name = flag_of(parameter.name)
                default = f"{name}/--no-{name[2:]}" if parameter.default is True else name
                # Within Annotated, the first flag stands where typer.Option takes a default.
                given = [flag for flag in (option.default, *(option.param_decls or ())) if isinstance(flag, str)]
                yield parameter.name, tuple(max(given or [default], key=len).split("/"))


@contextlib.contextmanager
def spoken(flags: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Have refusals name options as the command line does: "--max-tokens 0 is ..." for "max_tokens=0 is ..."."""
    try:
        yield
    except UserError as error:
        error.args = (in_flags(str(error), flags),)
        raise


def in_flags(text: str, flags: Mapping[str, Sequence[str]]) -> str:
    """Replace options' names in Python by their flags. A name that no value follows has to have an underscore: others
    are plain words."""

    def flag(found: re.Match[str]) -> str:
        name, value = found.groups()
        on, off = flags[name][0], flags[name][-1]
        if value == "=":
            return on if re.match(r"[\s:]", text[found.end() :]) else f"{on} "
        if value:
            return on if value == "=True" else off
        return on if "_" in name else name

    names = "|".join(map(re.escape, flags))
    return re.sub(rf"(?<![\w./'\"-])({names})(=True\b|=False\b|=|(?![\w/='\"-]|\.\w))", flag, text)


def sentences(cls: type) -> dict[str, str]:
    """Return the first sentence of what each option of a class says about itself, by the option's name."""
    texts = {field.name: field.metadata["text"] for field in dataclasses.fields(cls) if "text" in field.metadata}
    return {name: re.split(r"(?<=[.])\s", text, maxsplit=1)[0] for name, text in texts.items()}
