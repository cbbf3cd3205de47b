"""The tables cover every parameter, and the progress bar keeps quiet where nobody looks."""

from __future__ import annotations

import io
import sys

import pytest

from checkpoints import progress
from checkpoints.names import GGUF, HF, hf
from jaxspec.models.decoder import parameters
from tests.tiny_models import FAMILIES


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_names_of_every_parameter(config):
    known = parameters(config)
    for table in (hf(config.family), GGUF):
        names = [table.sources(name) for name in known]
        for (name, parameter), parts in zip(known.items(), names, strict=True):
            assert tuple(parts) == (tuple(dict(parameter.parts)) or ("",)), name
        flat = [name for parts in names for name in parts.values()]
        assert len(flat) == len(set(flat))


def test_layers_keep_their_number():
    assert HF.sources("layers.12.qkv_bias")["k"] == "model.layers.12.self_attn.k_proj.bias"
    assert GGUF.sources("layers.3.down") == {"": "blk.3.ffn_down.weight"}
    assert HF.sources("layers.0.post_mlp_norm") == {}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("patience", "enabled", "shown"), [(0.0, True, True), (1e6, True, False), (0.0, False, False)])
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
