"""How many sequences are written together: as many as the device has room for, unless somebody says how many."""

from __future__ import annotations

import pytest

from jaxspec.bench.presets import preset
from jaxspec.options.engine import EngineConfig
from jaxspec.train import writer
from jaxspec.train.data_options import DataOptions

SMOL = preset("smollm2-135m")


@pytest.mark.parametrize(("gib", "rows"), [(None, 16), (1000, 16), (0, 1)])
def test_rows_are_halved_until_they_fit(gib, rows, monkeypatch):
    monkeypatch.setattr(writer, "memory", lambda _: gib if gib is None else {"bytes_limit": gib << 30})
    assert writer.engine_options(DataOptions(tokens=1000), SMOL)["max_num_seqs"] == rows
    assert writer.engine_options(DataOptions(tokens=1000))["max_num_seqs"] == 16, "nothing is known of the target"
    assert writer.engine_options(DataOptions(tokens=1000, rows=3), SMOL)["max_num_seqs"] == 3, "as somebody said"


@pytest.mark.parametrize(("share", "fits"), [(1.01, True), (0.99, False)])
def test_all_that_an_engine_holds_counts(share, fits, monkeypatch):
    """Weights, pages for all rows, and what a pass over prompts and the logits take."""
    options = writer.with_rows(DataOptions(tokens=1000, length=512), 8)
    weights = 4 * 134_515_008  # float32, as on this machine
    pages = 8 * 512 * 2 * SMOL.num_layers * SMOL.num_kv_heads * SMOL.head_dim * 4
    chunk = 512 * 4 * (4 * SMOL.mlp_width + 8 * SMOL.width + 2 * SMOL.layers[0].qkv_width) * 4
    logits = 6 * 8 * SMOL.vocab_size * 4
    limit = share * (weights + pages + chunk + logits) / EngineConfig.memory_utilization
    monkeypatch.setattr(writer, "memory", lambda _: {"bytes_limit": limit})
    assert writer.fits(options, SMOL, "auto") == fits
