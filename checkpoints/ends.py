"""Stop ids: the token ids that some part of a checkpoint names as the end of a text.

Parts are the configuration files, the tokenizer's special tokens and the chat template. A family may have ends of its
own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from checkpoints import gguf, orbax
from checkpoints.gguf_config import GGUF_ENDS
from checkpoints.loading import GENERATION_CONFIG, load_config, load_generation_config, load_tokenizer
from checkpoints.reading import naming_file, read_config
from checkpoints.sources import Source
from jaxspec.models.config import ModelConfig
from jaxspec.models.families import ARCHITECTURES, FAMILIES
from jaxspec.models.limits import token_ids

# Pattern of the keys of config.json and generation_config.json whose values are stop ids.
ENDS = re.compile(r"(eos|eot|eom|eod|stop)(_token)?_ids?")
# Keys of config.json whose values are nested configurations that may also name stop ids.
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "decoder")
SPECIAL_TOKENS = ("eos_token", "eot_token", "eom_token", "eod_token")  # names of a tokenizer's tokens that end a text
ANSWER = "answer4711"  # the assistant's answer in a test conversation, a text that no chat template contains
MOST_LINES = 10_000  # largest number of lines that a chat template may execute; usual ones execute some hundred


def load_stop_ids(source: Source, tokenizer: Any = None, config: ModelConfig | None = None) -> tuple[int, ...]:
    """Return the token ids that end a text, each once. Arguments and errors are those of `load_ends`."""
    return tuple(load_ends(source, tokenizer, config))


def load_ends(source: Source, tokenizer: Any = None, config: ModelConfig | None = None) -> dict[int, tuple[str, ...]]:
    """Return the token ids that end a text, each with the parts of the checkpoint that name it.

    source: the checkpoint.
    tokenizer, config: the checkpoint's tokenizer and configuration; loaded if not given.
    Raises: UserError, naming the file, for a value that is not a token id of at most 31 bits.
    """
    tokenizer = load_tokenizer(source) if tokenizer is None else tokenizer
    found: dict[int, tuple[str, ...]] = {}
    for file, keys in named(source, config).items():
        for key, value in keys:
            with naming_file(source.path if source.kind == "gguf" else source.path / file):
                add(found, token_ids(value, key), f"{file} {key}".strip())
    for name in SPECIAL_TOKENS:
        with naming_file(source.path):
            own = token_ids(getattr(tokenizer, f"{name}_id", None), f"the tokenizer's {name}_id")
            add(found, own, f"tokenizer {name}")
    add(found, turn_ends(tokenizer), "chat template")
    known: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    family = FAMILIES.get(family_of(source, config))
    add(found, tuple(known[text] for text in (family.ends if family else ()) if text in known), "model family")
    return found


def family_of(source: Source, config: ModelConfig | None) -> str:
    """Return the name of the checkpoint's model family, "" for a GGUF file that is of none."""
    if config is None and source.kind == "gguf":
        return ARCHITECTURES.get(str(gguf.read_header(source.path).meta.get("general.architecture")), "")
    return (load_config(source) if config is None else config).family


def add(found: dict[int, tuple[str, ...]], ids: tuple[int, ...], part: str) -> None:
    """Record in `found` that a part of the checkpoint names these ids as stop ids."""
    for i in ids:
        found[i] = (*found.get(i, ()), part)


def named(source: Source, config: ModelConfig | None) -> dict[str, list[tuple[str, Any]]]:
    """Return for each configuration file of a checkpoint the keys that name stop ids, with their values.

    The metadata of a GGUF file count as one configuration file with an empty name.
    """
    if source.kind == "gguf":
        meta = gguf.read_header(source.path).meta
        return {"": [(key, meta[key]) for key in GGUF_ENDS if key in meta]}
    config = load_config(source) if config is None else config  # raises if the folder holds no supported model
    if source.kind == "orbax":
        return {orbax.CONFIG_FILE: [("eos_ids", config.eos_ids)]}
    own = read_config(source.path / "config.json")
    return {GENERATION_CONFIG: list(ends_of(load_generation_config(source))), "config.json": list(ends_of(own))}


def ends_of(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a configuration that name stop ids, with their values.

    raw: content of the configuration file; its nested configurations TEXT_CONFIGS are searched too.
    """
    yield from ((key, value) for key, value in raw.items() if ENDS.fullmatch(key))
    for name in TEXT_CONFIGS:
        part = raw.get(name)
        if isinstance(part, Mapping):
            yield from ((f"{name}.{key}", value) for key, value in ends_of(part))


def turn_ends(tokenizer: Any) -> tuple[int, ...]:
    """Return a tuple of one id: the control token that the chat template writes directly after the assistant's answer.

    The result is () if the template writes none.
    """
    template = str(getattr(tokenizer, "chat_template", None) or "")
    tokens = getattr(tokenizer, "added_tokens_decoder", {})
    control = {token.content: i for i, token in tokens.items() if token.special and token.content in template}
    if not control:
        return ()
    _, answer, after = rendered(tokenizer).rpartition(ANSWER)
    found = [text for text in control if answer and after.lstrip().startswith(text)]
    return (control[max(found, key=len)],) if found else ()


def rendered(tokenizer: Any) -> str:
    """Render a question and the answer ANSWER with the chat template. Return "" if the template fails or runs too long.

    Too long means that the template executes more than MOST_LINES lines.
    """
    lines = 0

    def count(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != "<template>":  # the file name that jinja gives to compiled templates
            return None
        lines += 1
        if lines > MOST_LINES:
            raise TimeoutError
        return count

    before = sys.gettrace()
    sys.settrace(count)  # lines are counted, because a template is a program from the checkpoint and may never end
    try:
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:
        return ""
    finally:
        sys.settrace(before)
