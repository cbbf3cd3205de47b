"""In the loop over drafts matrices are read as they lie: on CPU one that came in turned would be laid out anew in every
pass, which made EAGLE-3's four times as slow."""

from __future__ import annotations

import pytest

from jaxspec.models.decoder import parameters
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.runtime.packing import pack
from pallas_kernels.weights.output_first import Streamed
from tests.support import hlo, lively_heads
from tests.support.sizes import cases


@pytest.mark.usefixtures("exact_shapes")  # with more rows, an array may be as large as a matrix
@cases("sampled", [False, True], quick=[False])
@cases("kind", ["eagle3", "mtp", "pard"], quick=["eagle3"])
def test_no_matrix_is_laid_out_anew(kind, sampled):
    """A way to ids of the head's own, the target's, and a model's."""
    engine = lively_heads.engine(kind, 4, spec={"adaptive": False})
    request = engine.add([5, 6, 7, 8], SamplingParams(max_tokens=20, temperature=float(sampled), seed=1))
    engine.step(num_rounds=1)
    engine.scheduler.grow(num_rounds=1)
    plan, runner = engine.launch([request], 4, num_rounds=1), engine.runner
    for name, model in runner.paged.items():
        turned = [p for p, known in parameters(model.config).items() if known.kind == "matrix"]
        assert all(isinstance(runner.params[name][p], Streamed) for p in turned)
    made = runner.programs.lower("launch", runner.config(plan), runner.params, runner.cache, pack(plan.arrays))()
    program = hlo.Program(made.as_text())
    paged = runner.paged.values()
    sizes = {p.size for model in paged for p in parameters(model.config).values() if p.kind == "matrix"}
    moved = [i for i in program.all if i.opcode in ("copy", "transpose") or "copy" in i.name or "transpose" in i.name]
    assert not [i.line for i in moved if sizes & set(i.sizes)]
