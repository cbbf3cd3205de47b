"""The tables cover every parameter, and the progress bar keeps quiet where nobody looks."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest

from checkpoints import progress
from checkpoints.names import GGUF, HF, HF_SANDWICH, param_shapes
from jaxspec.models.decoder import abstract_params
from jaxspec.parallel.mesh import make_mesh
from tests.tiny import FAMILIES


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_shapes_and_names_of_every_parameter(config):
    decoder = {name: leaf.shape for name, leaf in abstract_params(config, "float32", make_mesh()).items()}
    assert param_shapes(config) == decoder
    shape = {"reduced_vocab_size": 24, "rare_vocab_size": 8, "rare_width": 4, "embed_width": 40}
    draft = dataclasses.replace(config, tied=False, **shape)
    abstract = {name: leaf.shape for name, leaf in abstract_params(draft, "float32", make_mesh()).items()}
    assert abstract.pop("embed") == (config.vocab_size, 40)  # the target's
    assert param_shapes(draft) == abstract
    for table in (HF_SANDWICH if config.sandwich_norm else HF, GGUF):
        names = [table.sources(parameter) for parameter in decoder]
        for parameter, parts in zip(decoder, names, strict=True):
            assert tuple(parts) == tuple(config.merged.get(parameter.rsplit(".", 1)[-1], ("",))), parameter
        flat = [name for parts in names for name in parts.values()]
        assert len(flat) == len(set(flat))


def test_layers_keep_their_number():
    assert HF.sources("layers.12.qkv_bias")["k"] == "model.layers.12.self_attn.k_proj.bias"
    assert GGUF.sources("layers.3.down") == {"": "blk.3.ffn_down.weight"}
    assert HF.sources("layers.0.post_mlp_norm") == {}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("patience", "enabled", "shown"), [(0.0, True, True), (60.0, True, False), (0.0, False, False)]
)
def test_the_bar_appears_only_when_the_work_takes_long(patience, enabled, shown, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress_bar("Loading weights", 100, enabled=enabled) as advance:
        for _ in range(4):
            advance(25)
    assert ("Loading weights" in screen.getvalue()) == shown


def test_no_bar_without_a_terminal(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    with progress.progress_bar("Loading weights", 100) as advance:
        advance(100)
    assert screen.getvalue() == ""
