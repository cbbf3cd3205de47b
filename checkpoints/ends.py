"""Token ids that end a text: every id that some part of a checkpoint calls an end, and which part that is."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from checkpoints import gguf, orbax
from checkpoints.gguf_config import GGUF_ENDS
from checkpoints.loading import GENERATION_CONFIG, load_config, load_generation_config, load_tokenizer
from checkpoints.reading import read_config, told
from checkpoints.sources import Source
from jaxspec.models.limits import token_ids

ENDS = re.compile(r"(eos|eot|eom|eod|stop)(_token)?_ids?")  # keys of config.json and generation_config.json
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "decoder")  # of config.json, which name ends too
SPECIAL_TOKENS = ("eos_token", "eot_token", "eom_token", "eod_token")  # of a tokenizer
ANSWER = "answer4711"  # a text that no template has
MOST_LINES = 10_000  # of its own that a template may run; it runs some hundred


def load_stop_ids(source: Source, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the token ids that end a text, without repetitions. Arguments and errors as those of `load_ends`."""
    return tuple(load_ends(source, tokenizer))


def load_ends(source: Source, tokenizer: Any = None) -> dict[int, tuple[str, ...]]:
    """Return the token ids that end a text, each with the parts of the checkpoint that name it.

    tokenizer: loaded from the source where not given.
    Raises: UserError naming the file for what is no id of 31 bits.
    """
    tokenizer = load_tokenizer(source) if tokenizer is None else tokenizer
    found: dict[int, tuple[str, ...]] = {}
    for file, keys in named(source).items():
        for key, value in keys:
            with told(source.path if source.kind == "gguf" else source.path / file):
                add(found, token_ids(value, key), f"{file} {key}".strip())
    for name in SPECIAL_TOKENS:
        with told(source.path):
            own = token_ids(getattr(tokenizer, f"{name}_id", None), f"the tokenizer's {name}_id")
            add(found, own, f"tokenizer {name}")
    add(found, turn_ends(tokenizer), "chat template")
    return found


def add(found: dict[int, tuple[str, ...]], ids: tuple[int, ...], part: str) -> None:
    """Note that a part of the checkpoint names these ids."""
    for i in ids:
        found[i] = (*found.get(i, ()), part)


def named(source: Source) -> dict[str, list[tuple[str, Any]]]:
    """Return the keys that name ends, with their values, by file."""
    if source.kind == "orbax":
        return {orbax.CONFIG_FILE: [("eos_ids", load_config(source).eos_ids)]}
    if source.kind == "gguf":
        meta = gguf.read_header(source.path).meta
        return {"": [(key, meta[key]) for key in GGUF_ENDS if key in meta]}
    load_config(source)  # refuses what is no model's
    own = read_config(source.path / "config.json")
    return {GENERATION_CONFIG: list(ends_of(load_generation_config(source))), "config.json": list(ends_of(own))}


def ends_of(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys that name ends, with their values; those of nested configurations of text models too."""
    yield from ((key, value) for key, value in raw.items() if ENDS.fullmatch(key))
    for name in TEXT_CONFIGS:
        if isinstance(part := raw.get(name), Mapping):
            yield from ((f"{name}.{key}", value) for key, value in ends_of(part))


def turn_ends(tokenizer: Any) -> tuple[int, ...]:
    """Return the control token that the chat template writes after an answer, if there is one."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    tokens = getattr(tokenizer, "added_tokens_decoder", {})
    control = {token.content: i for i, token in tokens.items() if token.special and token.content in template}
    if not control:
        return ()
    _, answer, after = rendered(tokenizer).rpartition(ANSWER)
    found = [text for text in control if answer and after.lstrip().startswith(text)]
    return (control[max(found, key=len)],) if found else ()


def rendered(tokenizer: Any) -> str:
    """Render a question and its answer by the chat template; "" where it does not take them, or runs for too long."""
    lines = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != "<template>":  # as jinja calls what it makes of one
            return None
        lines += 1
        if lines > MOST_LINES:
            raise TimeoutError
        return count

    before = sys.gettrace()
    sys.settrace(count)  # a template is a program of the model's, and may have no end
    try:
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:
        return ""
    finally:
        sys.settrace(before)
