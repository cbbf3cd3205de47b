"""Options of a command that are made from the fields of an option class, with their name, type, default and help."""

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
from jaxspec.common.values import flag_of

FIELD = inspect.Parameter.empty  # marks a property that a command's option takes over from its field


@dataclasses.dataclass(frozen=True)
class CommandOption:
    """The ways in which a command's option differs from the field of the option class that it is made from.

    flags: names of the option on the command line, such as "-k"; by default made from the field's name.
    kind: type of the option.
    default: default of the option; None leaves the field at its own default.
    help, metavar: texts for --help.
    """

    flags: tuple[str, ...] = ()
    kind: Any = FIELD
    default: Any = FIELD
    help: str | None = None
    metavar: str | None = None


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of an option class (a dataclass such as EngineConfig) that a command offers as options.

    This annotates a parameter of the command's function: Annotated[dict[str, Any], Fields(...)]. The function receives
    the options' values in that dict, without those that are None.

    cls: the option class.
    names: names of the fields that become options.
    own: differences of options from their fields, by the field's name.
    also: other names that error messages use for some of these fields, each with its field here.
    """

    cls: type
    names: Sequence[str]
    own: Mapping[str, CommandOption] = dataclasses.field(default_factory=dict)
    also: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def parameters(self) -> Iterator[inspect.Parameter]:
        """Yield a function parameter for each option. Typer sees these in place of the annotated parameter."""
        kinds, helps = typing.get_type_hints(self.cls), sentences(self.cls)
        fields = {field.name: field for field in dataclasses.fields(self.cls)}
        for name in self.names:
            own = self.own.get(name, CommandOption())
            kept = fields[name].default
            kept = FIELD if kept is dataclasses.MISSING else kept
            if own.kind is str and isinstance(kept, tuple):  # on the command line, values are separated by commas
                kept = ",".join(map(str, kept)) or None
            default = kept if own.default is FIELD else own.default
            text = own.help or helps.get(name, "")
            if default is None and not own.help and kept not in (None, FIELD, ()):  # else --help would show no default
                text = f"{text.removesuffix('.')}; {kept}."
            flags = own.flags or ((flag_of(name),) if default is False else ())
            option = typer.Option(*flags, help=text, metavar=own.metavar)
            kind = kinds[name] if own.kind is FIELD else own.kind
            kind = kind | None if default is None else kind
            yield inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
            )

    def taken(self, given: dict[str, Any]) -> dict[str, Any]:
        """Remove the values of this object's fields from those that typer parsed. Return the ones that are not None.

        given: all values that typer parsed, by option name.
        """
        found = {name: given.pop(name) for name in self.names}
        return {name: value for name, value in found.items() if value is not None}


def as_typer_takes_it(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command in the form that typer reads: with a parameter for each field of its `Fields` annotations.

    A UserError that the command raises names options by their flags.
    """
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
        with in_flag_terms(known):
            command(**{name: fields.taken(given) for name, fields in groups.items()}, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def flags(parameters: Sequence[inspect.Parameter]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (name, flags) of each option. flags: its longest flag and, for a switch, the flag that turns it off."""
    for parameter in parameters:
        for option in parameter.annotation.__metadata__:
            if isinstance(option, typer.models.OptionInfo):
                name = flag_of(parameter.name)
                default = f"{name}/--no-{name[2:]}" if parameter.default is True else name
                # Within Annotated, typer.Option's first flag is passed as its default.
                given = [flag for flag in (option.default, *(option.param_decls or ())) if isinstance(flag, str)]
                yield parameter.name, tuple(max(given or [default], key=len).split("/"))


@contextlib.contextmanager
def in_flag_terms(flags: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Let a UserError raised inside this context name options by flags: "--max-tokens 0 is" for "max_tokens=0 is".

    flags: flags of each option, by the option's name.
    """
    try:
        yield
    except UserError as error:
        error.args = (in_flags(str(error), flags),)
        raise


def in_flags(text: str, flags: Mapping[str, Sequence[str]]) -> str:
    """Replace the Python names of options in a text by their flags.

    A name that no value follows is replaced only if it has an underscore. Otherwise it may be an ordinary word.

    flags: flags of each option, by the option's name.
    """

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
    """Return the first sentence of the description of each option of an option class, by the option's name."""
    texts = {field.name: field.metadata["text"] for field in dataclasses.fields(cls) if "text" in field.metadata}
    return {name: re.split(r"(?<=[.])\s", text, maxsplit=1)[0] for name, text in texts.items()}
