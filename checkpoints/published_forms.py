"""The form in memory of each parameter of a checkpoint that is published in 8 or 4 bits."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from checkpoints.names import Table
from checkpoints.published import E4M3, Published
from jaxspec.common.errors import UserError
from jaxspec.models.parameters import Parameter
from jaxspec.options.quantization import Quantization

SMALLEST = 32  # smallest number of inputs that share a scale in memory; for fewer, scales take too much memory


def forms(published: Published | None, table: Table, known: Mapping[str, Parameter]) -> dict[str, Quantization]:
    """Return the form in memory of each parameter that stays in 8 bits, according to config.json.

    table: tensor names of the checkpoint.
    known: declarations of the parameters, by name.
    Raises: UserError as `held` does.
    """
    if published is None:
        return {}
    found: dict[str, Quantization] = {}
    for where, parameter in known.items():
        parts = [published.form(name.removesuffix(".weight")) for name in table.sources(where).values()]
        if form := held(where, parameter, parts):
            found[where] = form
    return found


def held(where: str, parameter: Parameter, parts: Collection[Quantization | None]) -> Quantization | None:
    """Return the form in memory of a parameter whose tensors have these forms. None if it is dequantised when loaded.

    Only matrices of products stay in 8 bits, and a merged one only if all its parts have the same dtype. No scale
    changes: if the parts, or the shards of the devices, are no whole blocks, smaller blocks repeat the scales.

    where: name of the parameter.
    parts: forms of the tensors that the parameter is merged from, None for a tensor that is not quantised.
    Raises: UserError if the blocks would become smaller than SMALLEST inputs.
    """
    known = [form for form in parts if form]
    if not parameter.is_quantised or None in parts or len({form.dtype for form in known}) != 1:
        return None
    inputs, outputs = parameter.shard_shape
    if known[0].dtype not in ("int8", E4M3):
        return grouped(where, parameter, known)
    sizes = [form.inputs for form in known if form.inputs and form.inputs < parameter.shape[0]]
    rows = [form.outputs for form in known if form.outputs]
    if not sizes:  # all weights of an output share a scale
        single = len(known) == 1 and (not rows or rows[0] >= parameter.shape[1])
        return Quantization(known[0].dtype, None, None if single else 1)
    columns = math.gcd(inputs, *sizes)
    if columns < SMALLEST:
        raise cut(where, parameter, sizes[0])
    return Quantization(known[0].dtype, columns, math.gcd(outputs, *rows, *dict(parameter.parts).values()))


def cut(where: str, parameter: Parameter, size: int) -> UserError:
    """Return the error for a parameter whose shards do not consist of whole blocks of `size` inputs."""
    inputs, whole = parameter.shard_shape[0], parameter.shape[0]
    part = "" if inputs == whole else f" a device of its {whole}"
    return UserError(
        f"{where} is published in blocks of {size} inputs, which do not divide the {inputs} inputs{part}: take "
        "another tensor_parallel_size, or the unquantised model with quantization='int8'"
    )


def grouped(where: str, parameter: Parameter, known: Sequence[Quantization]) -> Quantization | None:
    """Return the form in memory of a parameter whose tensors are integers in groups, as `held` does.

    Groups do not change. A merged parameter stays in groups only if all its parts have the same.
    """
    if len(set(known)) != 1:
        return None
    size = known[0].inputs or SMALLEST
    if parameter.shard_shape[0] % size:
        raise cut(where, parameter, size)
    return known[0]
