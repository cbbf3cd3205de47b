"""The command `jaxspec info`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from jaxspec.cli.shared import MODEL_HELP, AsJson
from jaxspec.common.errors import UserError
from jaxspec.hardware.accelerators import ACCELERATORS


def info(
    model: Annotated[str, typer.Argument(help=MODEL_HELP + " With --chips also a preset of jaxspec bench.")],
    draft: Annotated[str | None, typer.Option(help="Check whether this draft fits the model.")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="An accelerator that need not be here: " + ", ".join(ACCELERATORS) + ". Default: this machine's."
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            help="Rows of the engine whose programs are listed (with --json by name), or with --chips of the engine "
            "whose temporary memory is counted."
        ),
    ] = None,
    chips: Annotated[
        str | None,
        typer.Option(help="Check from shapes alone whether both fit on these devices, such as v5e:2x4 or H200:4."),
    ] = None,
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="With --chips: devices that the model is sharded over. Default: all.")
    ] = None,
    draft_tensor_parallel_size: Annotated[
        int | None, typer.Option(help="With --chips: devices that the draft is sharded over. Default: 1.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="With --chips: dtype of both. Default: the platform's own.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="With --chips: form of the model's weights, such as int8 or fp8. Default: none.")
    ] = None,
    draft_quantization: Annotated[
        str | None, typer.Option(help="With --chips: form of the draft's weights. Default: none.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None, typer.Option(help="With --chips: form of the model's keys and values: int8 or fp8. Default: auto.")
    ] = None,
    draft_kv_cache_dtype: Annotated[
        str | None, typer.Option(help="With --chips: form of the draft's keys and values. Default: auto.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="With --chips: tokens of the longest row. Default: the model's own.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option("-k", "--num-speculative-tokens", min=1, help="With --chips: drafts a round.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a model and what it needs, without loading its weights."""
    options = {
        "tensor_parallel_size": tensor_parallel_size,
        "draft_tensor_parallel_size": draft_tensor_parallel_size,
        "dtype": dtype,
        "quantization": quantization,
        "draft_quantization": draft_quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "draft_kv_cache_dtype": draft_kv_cache_dtype,
        "max_model_len": max_model_len,
        "num_speculative_tokens": num_speculative_tokens,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if given and chips is None:
        name = next(iter(given))
        raise UserError(f"--{name.replace('_', '-')} {given[name]} needs --chips: give both, or neither")
    if chips is not None and device is not None:
        raise UserError(f"--device {device!r} and --chips {chips!r} exclude each other: give one of them")

    from jaxspec.inspect import info

    if chips is None:
        document = info.describe(model, draft, device, max_num_seqs)
        show = info.show
    else:
        if max_num_seqs is not None:
            given["max_num_seqs"] = max_num_seqs
        document = info.on_chips(model, draft, chips, **given)
        show = info.show_chips
    if as_json:
        print(json.dumps(document))
    else:
        show(document)
    problem = info.problem(document)
    if problem:
        raise UserError(problem)
