"""A key that is null is one that is absent, whichever reader asks for it."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

import checkpoints
from checkpoints import hf_config
from checkpoints.reading import NULL_IS_A_VALUE
from jaxspec.api.one_call import model_defaults
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.drafters.head_checkpoint import flattened
from jaxspec.loading import resolved as resolving
from jaxspec.loading.resolved import ResolvedModel, resolved_draft
from jaxspec.models.config import ModelConfig
from jaxspec.options.transformers import OF_THE_MODEL, OF_THE_TEXT
from tests.checkpoints.files import rewrite
from tests.drafters.references import mtp
from tests.drafters.test_formats import METHODS, TARGET
from tests.golden.families import FAMILIES, FOLDER
from tests.support.model_folders import write_model, write_tokenizer


def outcome(read, *arguments: Any) -> Any:
    """What is read, or the refusal."""
    try:
        return read(*arguments)
    except (UserError, UnsupportedError) as error:
        return str(error)


def compared(path: Path, raw: dict[str, Any], keys: Any, read, kept=()) -> None:
    """Of each key: the file with it null, and without it, is read alike."""
    for key in keys:
        found = []
        for said in ({key: None}, {}):
            path.write_text(json.dumps({name: x for name, x in raw.items() if name != key} | said))
            found.append(outcome(read))
        if key not in kept:
            assert found[0] == found[1], key


@pytest.mark.parametrize("family", FAMILIES)
def test_a_models_config(family, tmp_path):
    folder = rewrite(tmp_path, family)
    raw = json.loads((folder / "config.json").read_text())
    source = checkpoints.resolve(str(folder))
    other = {"quantization_config", "compression_config", "text_config", "vision_config"}
    keys = ({*hf_config.READ, *raw} | other) - {"model_type", "architectures"}
    compared(folder / "config.json", raw, sorted(keys), lambda: checkpoints.load_config(source), NULL_IS_A_VALUE)


def test_what_null_says_of_a_window_and_of_heads(tmp_path):
    """No window, where Mistral's default is one; and as many key-value heads as query heads, where it is eight."""
    config = checkpoints.load_config(checkpoints.resolve(str(rewrite(tmp_path, "mistral", sliding_window=None))))
    assert set(config.windows) == {None}
    heads = {"num_attention_heads": 4, "num_key_value_heads": None}
    config = checkpoints.load_config(checkpoints.resolve(str(rewrite(tmp_path, "mistral", **heads))))
    assert (config.num_heads, config.num_kv_heads) == (4, 4)


class Recording(dict):
    """config.json of a head, and the keys that its readers ask for."""

    asked: ClassVar[set[str]] = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> ModelConfig:
    folder = write_model(tmp_path_factory.mktemp("nulls") / "target", layers=4, rope_theta=TARGET.rope_theta)
    return checkpoints.load_config(checkpoints.resolve(str(folder)))


@pytest.mark.parametrize("name", METHODS)
def test_a_heads_config(name, target, tmp_path, monkeypatch):
    """Every key that a head's reader asks for, and every one that its writer says, outside and in its parts."""
    reference, options = METHODS[name]
    reference.write(tmp_path, seed=0, target=TARGET, **options)
    path, method = tmp_path / "config.json", "mtp" if reference is mtp else None
    raw = json.loads(path.read_text())
    beside = ResolvedModel(checkpoints.Source("hf", tmp_path / "target", "target"), target)
    read = lambda: resolved_draft(checkpoints.resolve(str(tmp_path)), beside, method).reading
    monkeypatch.setattr(resolving, "flattened", lambda raw: Recording(flattened(raw)))
    monkeypatch.setattr(Recording, "asked", set())
    read()
    keys = Recording.asked | raw.keys()
    assert reference is mtp or keys
    compared(path, raw, sorted(keys), read)
    for part, inner in raw.items():
        if isinstance(inner, Mapping):

            def within(part=part, text=path.read_text) -> Any:
                """The key stands in this part."""
                changed = json.loads(text())
                path.write_text(json.dumps(raw | {part: changed}))
                return read()

            compared(path, dict(inner), sorted(Recording.asked | inner.keys()), within)


def test_a_generation_config(tmp_path):
    folder = write_model(tmp_path)
    path, source = folder / "generation_config.json", checkpoints.resolve(str(folder))

    class Loaded:
        _resolved = types.SimpleNamespace(source=source)

    everything = {"eos_token_id": [3], "temperature": 0.5, "do_sample": True, "top_k": 5, "max_new_tokens": 7}
    keys = {*everything, *OF_THE_MODEL.union(*OF_THE_TEXT.values()), "stop_token_ids"}
    read = lambda: (checkpoints.load_ends(source), model_defaults(Loaded, {}))
    compared(path, everything, sorted(keys), read)


TOKENIZER_KEYS = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens"),
    *("auto_map", "chat_template", "clean_up_tokenization_spaces", "extra_special_tokens", "legacy", "max_length"),
    *("model_input_names", "model_max_length", "padding_side", "split_special_tokens", "tokenizer_class"),
    *("tokenizer_file", "truncation_side", "use_default_system_prompt", "bos_token", "eos_token", "unk_token"),
)


def test_a_tokenizers_config(tmp_path):
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    raw = json.loads(path.read_text())
    (tmp_path / "config.json").write_bytes((FOLDER / "llama2" / "config.json").read_bytes())

    def read() -> Any:
        found = checkpoints.load_tokenizer(checkpoints.Source("hf", tmp_path, "model"))
        ids = found.encode("One <s> fox. One two </s>")
        texts = [found.decode(ids, skip_special_tokens=skip) for skip in (False, True)]
        assert found.name_or_path == str(tmp_path)
        return found.get_vocab(), ids, texts, found.chat_template, found.special_tokens_map, found.model_max_length

    compared(path, raw, TOKENIZER_KEYS, read)
    path.write_text(json.dumps(raw))
    nulls = dict.fromkeys(hf_config.READ, None) | {"model_type": "llama"}
    wanted = read()
    (tmp_path / "config.json").write_text(json.dumps(nulls))  # which transformers reads of a tokenizer's folder, too
    assert read() == wanted
