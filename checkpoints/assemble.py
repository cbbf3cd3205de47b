"""Build sharded parameters in the decoder's layout from the named tensors of a file.

Files store the weight matrix of a matrix product output-first, [O, I]; the decoder needs it input-first, [I, O]. Some
parameters merge several tensors of the file, such as queries, keys and values. The host reads each device's shard in
the file's layout, and merges tensors by copying whole rows (`LayerConfig.qkv_parts`). The device then transposes the
shard and converts its dtype. Transposing bfloat16 in numpy is a slow strided copy (over a minute for 8B parameters).
The device transposes two to five times faster, even if it is a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from checkpoints import forms
from checkpoints.copies import check_frequencies, check_repeats
from checkpoints.names import Again, Table
from checkpoints.published_forms import held
from checkpoints.tensor_file import Index, TensorFile
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.common.progress import byte_progress
from jaxspec.models.config import ModelConfig
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.parameters import Parameter
from pallas_kernels.weights import AnyWeight, grouped, shardings
from pallas_kernels.weights.grouped import Grouped
from pallas_kernels.weights.scaled import Scaled, abstract

Read = Callable[[str, Index], np.ndarray]
Edit = Callable[[Parameter, str, np.ndarray], np.ndarray]
Keep = Callable[[str, Parameter, AnyWeight], Any]


def unchanged(where: str, parameter: Parameter, x: AnyWeight) -> AnyWeight:
    """Return the values x as they are. This is the `keep` function for a model that is not quantised after loading."""
    return x


def stored_shape(parameter: Parameter, part: str) -> tuple[int, ...]:
    """Return the shape that a file's tensor must have.

    parameter: the parameter that the tensor fills, alone or with other tensors.
    part: the part of a merged parameter, such as "q"; "" if the tensor fills the whole parameter.
    """
    columns = dict(parameter.parts)
    if part not in columns:
        return parameter.shape[::-1] if parameter.kind == "matrix" else parameter.shape
    rows = parameter.shape[-1] * columns[part] // sum(columns.values())
    return (rows // dict(parameter.copies).get(part, 1), *parameter.shape[:-1])


def together(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Group the parts of one parameter by the tensor of the file that stores them.

    names: name of the tensor for each part, in the order of the parameter's rows.
    Returns: for each tensor, the parts that are stacked in it, in the order of its rows.
    """
    own = {part: tensor for part, tensor in names.items() if not isinstance(tensor, Again)}
    return {tensor: [part for part in own if own[part] == tensor] for tensor in own.values()}


def expected_shape(parameter: Parameter, parts: Sequence[str]) -> tuple[int, ...]:
    """Return the shape that a file's tensor with these parts of a parameter must have."""
    shapes = [stored_shape(parameter, part) for part in parts]
    return shapes[0] if len(shapes) == 1 else (sum(rows for rows, *_ in shapes), *shapes[0][1:])


def within(parameter: Parameter, names: Mapping[str, str], part: str, index: Index) -> Index:
    """Return the slice of the tensor that holds a part, for the slice `index` of the part itself.

    names: tensor name for each part of the parameter.
    """
    if isinstance(names[part], Again):
        return index
    before = together(names)[names[part]]
    start = sum(stored_shape(parameter, other)[0] for other in before[: before.index(part)])
    return (slice(index[0].start + start, index[0].stop + start), *index[1:]) if start else index


def copying(parameter: Parameter, read: Read) -> Read:
    """Wrap the function `read`, so that its result repeats groups of rows, such as key-value heads.

    `Parameter.copies` gives the number of copies of each group of a part. The row indices given to the returned
    function count the parameter's rows, with all copies; `read` gets indices of rows in the file.
    """
    sizes = dict(parameter.parts)
    copies = dict(parameter.copies)

    def copied(part: str, index: Index) -> np.ndarray:
        n = copies.get(part, 1)
        if n == 1:
            return read(part, index)
        rows, size = index[0], sizes[part]
        first, last = rows.start // size, rows.stop // size  # range of groups of the parameter, copies included
        x = read(part, (slice(first // n * size, -(-last // n) * size), *index[1:]))
        groups = np.repeat(x.reshape(-1, size, *x.shape[1:]), n, axis=0)[first % n :][: last - first]
        return groups.reshape(-1, *x.shape[1:])

    return copied


def check(config: ModelConfig, abstract: Mapping[str, Parameter], table: Table, file: TensorFile) -> None:
    """Compare the names and shapes of the file's tensors with those that the model needs, before any tensor is read.

    Raises: UserError that names the first tensor that is missing, has a wrong shape, or is not part of the model.
    """
    found = file.shapes()
    used: set[str] = set()
    for where, parameter in abstract.items():
        for name, parts in together(table.sources(where)).items():
            expected = expected_shape(parameter, parts)
            if name not in found:
                raise UserError(f"{file.where}: tensor {name} is missing (the model needs it for {where})")
            if found[name] != expected:
                raise UserError(f"{file.where}: tensor {name} has shape {found[name]}, expected {expected}")
            used.add(name)
    if extra := table.unknown(found, used):
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        method = draft_spec(config).method
        kind = f"a {config.family} model" if method == "draft_model" else f"a head of method {method!r}"
        raise UserError(f"{file.where}: tensor {extra[0]}{more} is not part of {kind}")


def assemble(
    config: ModelConfig,
    abstract: Mapping[str, Parameter],
    table: Table,
    file: TensorFile,
    *,
    edit: Edit,
    keep: Keep = unchanged,
    progress: bool = True,
) -> dict[str, Any]:
    """Read every parameter of `abstract` from `file`, with the dtype and sharding that `abstract` gives it.

    abstract: declarations of the parameters, by name.
    table: the file format's tensor names.
    edit: function edit(parameter, part, rows) that undoes a transformation that the file format applied to values or to
      the order of rows. The rows of queries and keys that it gets are whole heads.
    keep, progress: as in `checkpoints.load_params`.
    Raises: UserError as `check` does; UnsupportedError as `check_repeats` and `check_frequencies` do, and for a tensor
      of integers where floating point is needed, or the reverse.
    """
    check(config, abstract, table, file)
    check_repeats(table, file)
    check_frequencies(config, table, file)
    params: dict[str, Any] = {}
    total = sum(parameter.nbytes for parameter in abstract.values())
    with byte_progress("loading weights", total, enabled=progress) as advance:
        for where, parameter in abstract.items():
            names = table.sources(where)

            def read(
                part: str, index: Index, names: Mapping[str, str] = names, parameter: Parameter = parameter
            ) -> np.ndarray:
                x = file.read(names[part], within(parameter, names, part, index))
                if (parameter.kind == "ids") != (x.dtype.kind in "iub"):
                    needed = "integers are" if parameter.kind == "ids" else "floating point is"
                    raise UnsupportedError(
                        f"{file.where}: tensor {names[part]} is stored as {x.dtype}: {needed} needed"
                    )
                return edit(parameter, part, x)

            x: Any = eight_bits(where, parameter, names, file, edit)
            if x is None:
                x = in_groups(where, parameter, names, file, edit)
            params[where] = keep(
                where, parameter, place(where, parameter, copying(parameter, read)) if x is None else x
            )
            advance(parameter.nbytes)
    return params


def eight_bits(
    where: str, parameter: Parameter, names: Mapping[str, str], file: TensorFile, edit: Edit
) -> Scaled | None:
    """Read a parameter that the file holds in 8 bits, with the values and scales of the file.

    Return None for a parameter that is read as floats (`published_forms.held`).

    where: name of the parameter.
    names: tensor name for each part of the parameter.
    edit: as in `assemble`. It may reorder the rows of queries and keys, and their scales with them.
    """
    found = {part: file.eight_bits(name) for part, name in names.items()}
    form = held(where, parameter, [tensor.form if tensor else None for tensor in found.values()])
    if form is None:
        return None
    tensors = {part: tensor for part, tensor in found.items() if tensor}
    shape: Any = parameter.shape
    block = form.block(shape)  # numbers of inputs and outputs
    whole = abstract(shape, form.dtype, block, jnp.dtype(parameter.dtype).name)
    sharding = shardings(whole, parameter.sharding or SingleDeviceSharding(jax.devices()[0]))

    def values(part: str, index: Index) -> np.ndarray:
        return edit(parameter, part, tensors[part].values(within(parameter, names, part, index)))

    def scales(part: str, index: Index) -> np.ndarray:
        rows, columns = within(parameter, names, part, index)
        found = tensors[part].scales((rows, slice(columns.start * block[0], columns.stop * block[0])), block[0])
        found = edit(parameter, part, found)
        if not (found[:: block[1]].repeat(block[1], axis=0) == found).all():
            raise UnsupportedError(
                f"{file.where}: a block of {block[1]} outputs of {where} has several scales once the rows of its heads "
                "are reordered: take the unquantised model, with quantization='fp8'"
            )
        return found

    return dataclasses.replace(
        whole,
        values=gather(where, parameter, whole.values.shape, sharding.values, copying(parameter, values)),
        scale=gather(where, parameter, whole.scale.shape, sharding.scale, copying(parameter, scales), block[1]),
    )


def in_groups(
    where: str,
    parameter: Parameter,
    names: Mapping[str, str],
    file: TensorFile,
    edit: Edit,
) -> Grouped | None:
    """Read a parameter that the file holds in integers of few bits in groups, with the integers and scales of the file.

    Return None for a parameter that is read as floats (`published_forms.held`). Arguments are those of `assemble`.
    Raises: UserError for inputs in another order that are sharded, or that merged tensors do not share.
    """
    found = {part: file.grouped(name) for part, name in names.items()}
    tensors = {part: tensor for part, tensor in found.items() if tensor}
    form = held(where, parameter, [tensor.form if tensor else None for tensor in found.values()])
    layout = form and forms.layout(form)
    if not layout or len(tensors) < len(found):
        return None
    orders: list[Any] = [tensor.order for tensor in tensors.values()]
    if any(not np.array_equal(order, orders[0]) for order in orders[1:]):
        return None
    if orders[0] is not None and parameter.shard_shape[0] != parameter.shape[0]:
        raise UserError(
            f"{file.where}: {where} has its inputs in another order (act order), which are not sharded: take "
            "tensor_parallel_size=1, or a checkpoint without desc_act or actorder"
        )
    shape: Any = parameter.shape
    computes_in = jnp.dtype(parameter.dtype).name
    sharding = parameter.sharding or SingleDeviceSharding(jax.devices()[0])
    placed = shardings(grouped.abstract(layout, shape, computes_in), sharding)

    def make(field: str, i: int, of_array: tuple[int, int], dtype: str) -> jax.Array:
        def read(part: str, index: Index) -> np.ndarray:
            rows, columns = index = within(parameter, names, part, index)
            if field != "values":
                return edit(parameter, part, tensors[part].factor(field, i, index)).astype(dtype)
            per_byte = 8 / layout.bits[i]
            inputs = slice(int(columns.start * per_byte), int(columns.stop * per_byte))
            integers = tensors[part].integers((rows, inputs))
            return edit(parameter, part, grouped.packed(integers, layout.bits)[i])

        where_placed = placed.zeros if field == "zeros" else getattr(placed, field)[i]
        return gather(where, parameter, of_array, where_placed, copying(parameter, read))

    weight = grouped.arrays(layout, shape, make, computes_in)
    if orders[0] is None:
        return weight
    replicated = NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else sharding
    return dataclasses.replace(weight, order=jax.device_put(orders[0], replicated))


def place(where: str, parameter: Parameter, read: Read) -> jax.Array:
    """Read one parameter shard by shard in the file's layout, then transpose and convert it on its devices.

    where: name of the parameter.
    read: function read(part, index) that returns a slice of the tensor for a part of the parameter.
    """
    transpose = parameter.kind == "matrix"  # tables and vectors have the same layout in files as in the decoder
    sharding = parameter.sharding or SingleDeviceSharding(jax.devices()[0])
    shape = parameter.shape  # shape in the file's layout; `stored` is the sharding in that layout
    stored = sharding
    if transpose:
        shape = (*shape[1:], shape[0])
        if isinstance(sharding, NamedSharding):
            spec = tuple(sharding.spec) + (None,) * (len(shape) - len(sharding.spec))
            stored = NamedSharding(sharding.mesh, P(*spec[1:], spec[0]))
    array = gather(where, parameter, shape, stored, read)
    if not transpose and array.dtype == parameter.dtype:
        return array
    return converter(transpose, jnp.dtype(parameter.dtype), sharding)(array)


def gather(
    where: str, parameter: Parameter, shape: tuple[int, ...], sharding: Any, read: Read, every: int = 1
) -> jax.Array:
    """Read an array in the file's layout, shard by shard.

    where: name of the parameter.
    shape: shape of the array in the file's layout, in which rows come first.
    sharding: sharding of the array in that layout.
    read: function read(part, index) that returns a slice of the tensor for a part of the parameter.
    every: number of rows of the parameter for each row of the array, which has the first of them.
    """
    pieces: dict[Any, np.ndarray] = {}  # shards read so far, so that devices that hold the same shard share one read

    def piece(index: Any) -> np.ndarray:
        """Return one device's shard, in the file's layout. index: the shard's slice of each axis."""
        rows, *rest = (slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True))
        index = (slice(every * rows.start, every * rows.stop), *rest)
        key = tuple((s.start, s.stop) for s in index)
        if key not in pieces:
            pieces[key] = merge(where, parameter, index, read)[::every]
        return pieces[key]

    return jax.make_array_from_callback(shape, sharding, piece)


@functools.lru_cache(maxsize=64)
def converter(transpose: bool, dtype: Any, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    """Return a compiled function that converts an array's dtype and, if `transpose`, moves its last axis to the front.

    In a file, the last axis of a matrix is the input axis. sharding: sharding of the function's result.
    """
    return jax.jit(lambda x: (jnp.moveaxis(x, -1, 0) if transpose else x).astype(dtype), out_shardings=sharding)


def merge(where: str, parameter: Parameter, index: Index, read: Read) -> np.ndarray:
    """Return the slice `index` of a parameter in the file's layout.

    A merged parameter consists of groups of rows, and each group holds some rows of every part (`Parameter.parts`).
    Raises: UserError where the slice cuts through a group.
    """
    if not parameter.parts:
        return read("", index)
    sizes = dict(parameter.parts)
    rows, rest = index[0], index[1:]
    group = sum(sizes.values())
    if rows.start % group or rows.stop % group:
        raise UserError(
            f"the mesh cuts through a group of {where}: the number of shards must divide the number of groups"
        )
    first, last = rows.start // group, rows.stop // group

    def groups(part: str, size: int) -> np.ndarray:
        x = read(part, (slice(first * size, last * size), *rest))
        return x.reshape(last - first, size, *x.shape[1:])

    x = np.concatenate([groups(part, size) for part, size in sizes.items()], axis=1)
    return x.reshape(-1, *x.shape[2:])
