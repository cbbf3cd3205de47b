"""What ends a text: the ids that any part of a checkpoint calls an end, each with the parts that do."""

from __future__ import annotations

import json
from typing import Any

import pytest

import checkpoints
from jaxspec.inspect import info
from tests.checkpoints.files import hf, rewrite, write_gguf
from tests.checkpoints.test_gguf_tokenizer import byte_level_meta
from tests.support.model_folders import write_model

CHATML = "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>' }}\n{% endfor %}"


class Tokenizer:
    eos_token_id = 9


NAMED: list[tuple[dict[str, Any], dict[str, Any], dict[int, tuple[str, ...]]]] = [
    ({"eos_token_id": 2}, {}, {2: ("config.json eos_token_id",)}),
    ({"eos_token_id": [2, 5]}, {}, {2: ("config.json eos_token_id",), 5: ("config.json eos_token_id",)}),
    (
        {"eos_token_id": 2, "eos_token_ids": [4, 2]},
        {},
        {2: ("config.json eos_token_id", "config.json eos_token_ids"), 4: ("config.json eos_token_ids",)},
    ),
    (
        {"eos_token_id": 2},
        {"eos_token_id": 7},
        {7: ("generation_config.json eos_token_id",), 2: ("config.json eos_token_id",)},
    ),
    ({"eos_token_id": None}, {"stop_token_ids": [3]}, {3: ("generation_config.json stop_token_ids",)}),
    ({"eos_token_id": None, "eot_token_id": 3, "eod_id": 4}, {"eom_token_id": 6}, {6: (), 3: (), 4: ()}),
    ({"eos_token_id": None, "text_config": {"eos_token_id": [3]}}, {}, {3: ("config.json text_config.eos_token_id",)}),
    (
        {"eos_token_id": 9},
        {"eos_token_id": None},
        {9: ("config.json eos_token_id", "tokenizer eos_token")},
    ),
]


@pytest.mark.parametrize(("config", "generation", "wanted"), NAMED)
def test_every_key_of_a_folder(config, generation, wanted, tmp_path):
    source = hf(rewrite(tmp_path, "llama2", **config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    ends = checkpoints.load_ends(source, Tokenizer)
    assert list(ends) == list(dict.fromkeys([*wanted, 9]))
    for i, parts in wanted.items():
        assert ends[i] == parts or not parts
    assert checkpoints.load_stop_ids(source, Tokenizer) == tuple(ends)


def test_an_id_that_no_file_names(tmp_path):
    """transformers would fill in another model's."""
    source = hf(rewrite(tmp_path, "llama2"))
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert checkpoints.load_ends(source, Tokenizer) == {9: ("tokenizer eos_token",)}


def test_a_chat_of_a_file_that_names_the_pretrained_models_end(tmp_path):
    """A GGUF file's eos, eot and eom, and what its chat template writes after an answer."""
    meta = byte_level_meta("qwen2", eos_token_id=0) | {"chat_template": CHATML}
    path = write_gguf(tmp_path / "m.gguf", "qwen2", tokenizer=meta | {"ggml.eot_token_id": 5, "ggml.eom_token_id": 6})
    assert checkpoints.load_ends(checkpoints.resolve(str(path))) == {
        0: ("tokenizer.ggml.eos_token_id", "tokenizer eos_token"),
        5: ("tokenizer.ggml.eot_token_id",),
        6: ("tokenizer.ggml.eom_token_id",),
        2: ("chat template",),
    }


BEGINS = "{% for m in messages %}<user>{{ m.content }}"
TEMPLATES = {
    "right behind": (BEGINS + "<bot>{% endfor %}", ["<bot>"]),
    "after space": (BEGINS + " \n<bot>\n{% endfor %}", ["<bot>"]),
    "by role": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<user>{% else %}{{ m.content }}<bot>"
        "{% endif %}{% endfor %}",
        ["<bot>"],
    ),
    "nothing": (BEGINS + "{% endfor %}", []),
    "no control token": (BEGINS + "and<bot>{% endfor %}", []),
    "what is refused": ("<bot>{{ raise_exception('no') }}", []),
    "what has no end": (
        BEGINS + "<bot>{% endfor %}" + "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4,
        [],
    ),
    "without the answer": ("<bot>{{ messages[0].content }}<bot>", []),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_a_turn(name, tmp_path):
    tokenizer = checkpoints.load_tokenizer(checkpoints.resolve(str(write_model(tmp_path, layers=1))))
    template, wanted = TEMPLATES[name]
    tokenizer.chat_template = template
    ends = checkpoints.load_ends(checkpoints.resolve(str(tmp_path)), tokenizer)
    found = [i for i, parts in ends.items() if "chat template" in parts]
    assert tokenizer.convert_ids_to_tokens(found) == wanted


def test_info_says_which_part_names_each(tmp_path, capsys):
    write_model(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": BEGINS + "<bot>{% endfor %}"})
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    document = info.describe(str(tmp_path))
    assert document["model"]["stop_ids"] == [3, 2, 4]
    assert document["model"]["stop_ids_named_by"] == [
        ["generation_config.json eos_token_id"],
        ["generation_config.json eos_token_id", "config.json eos_token_id", "tokenizer eos_token"],
        ["chat template"],
    ]
    info.show(document)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "4 <bot> (chat template)" in shown
