"""Named tensors in a file's layout -> parameters on their devices, in the decoder's layout.

Files store a product's weights output-first, [O, I]; the decoder wants them input-first. Each device's part is read
in the file's order, merged there by copying whole rows (`ModelConfig.merged`), sent to the device as it is stored, and
only there transposed and converted. Transposing bfloat16 in numpy is a slow strided copy (over a
minute for 8B parameters); the device does it two to five times faster even where it is a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from checkpoints.names import Table
from checkpoints.progress import progress_bar
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig

Index = tuple[slice, ...]
Read = Callable[[str, Index], np.ndarray]


class TensorFile(Protocol):
    """What a format offers: names and shapes at no cost, and slices of one tensor."""

    where: str  # for messages

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, index: Index) -> np.ndarray: ...


def leaf_of(parameter: str) -> str:
    return parameter.rsplit(".", 1)[-1]


def output_first(parameter: str, shape: tuple[int, ...]) -> bool:
    """Whether files store the parameter with its first axis last: products do, tables and vectors do not."""
    return len(shape) > 1 and leaf_of(parameter) != "embed"


def stored_shape(config: ModelConfig, parameter: str, part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a file's tensor must have to be `part` of `parameter`, which has `shape`."""
    if part:
        columns = config.merged[leaf_of(parameter)]
        return (shape[-1] * columns[part] // sum(columns.values()), *shape[:-1])
    return (*shape[1:], shape[0]) if output_first(parameter, shape) else shape


def check(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], table: Table, file: TensorFile) -> None:
    """Compares what the file holds with what the model needs, before anything is read.

    Raises: UserError that names the first tensor that is missing, of a wrong shape, or not part of the model.
    """
    found, used = file.shapes(), set()
    for parameter, shape in shapes.items():
        for part, name in table.sources(parameter).items():
            expected = stored_shape(config, parameter, part, shape)
            if name not in found:
                raise UserError(f"{file.where}: tensor {name} is missing (the model needs it for {parameter})")
            if found[name] != expected:
                raise UserError(f"{file.where}: tensor {name} has shape {found[name]}, expected {expected}")
            used.add(name)
    if config.tied:  # some files repeat the embedding table as a head
        used |= set(table.sources("head").values())
    if extra := table.unknown(found, used):
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UserError(f"{file.where}: tensor {extra[0]}{more} is not part of a {config.family} model")


def assemble(
    config: ModelConfig,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    table: Table,
    file: TensorFile,
    *,
    edit: Callable[[str, str, np.ndarray], np.ndarray],
    progress: bool = True,
) -> dict[str, jax.Array]:
    """Every parameter of `abstract`, read from `file`, with the dtype and sharding that `abstract` asks for.

    edit(leaf, part, rows): undoes what the format did to a tensor's values or rows; it sees whole heads of q and k.
    Raises: UserError as `check` does.
    """
    check(config, {name: leaf.shape for name, leaf in abstract.items()}, table, file)
    params: dict[str, jax.Array] = {}
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in abstract.values())
    with progress_bar("Loading weights", total, enabled=progress) as advance:
        for parameter, target in abstract.items():
            names, leaf = table.sources(parameter), leaf_of(parameter)

            def read(part: str, index: Index, names=names, leaf=leaf) -> np.ndarray:
                return edit(leaf, part, file.read(names[part], index))

            params[parameter] = place(config, parameter, target, read)
            advance(target.size * target.dtype.itemsize)
    return params


def place(config: ModelConfig, parameter: str, target: jax.ShapeDtypeStruct, read: Read) -> jax.Array:
    """One parameter: read in the file's order by each device's part, then turned and converted on the devices."""
    turned, leaf = output_first(parameter, target.shape), leaf_of(parameter)
    sharding = target.sharding or SingleDeviceSharding(jax.devices()[0])
    shape, stored = target.shape, sharding
    if turned:
        shape = (*shape[1:], shape[0])
        if isinstance(sharding, NamedSharding):
            spec = tuple(sharding.spec) + (None,) * (len(shape) - len(sharding.spec))
            stored = NamedSharding(sharding.mesh, P(*spec[1:], spec[0]))
    pieces: dict[Any, np.ndarray] = {}  # devices that hold the same part share one read

    def piece(index: Any) -> np.ndarray:
        index = tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True))
        key = tuple((s.start, s.stop) for s in index)
        if key not in pieces:
            pieces[key] = merge(config, leaf, index, read)
        return pieces[key]

    array = jax.make_array_from_callback(shape, stored, piece)
    if not turned and array.dtype == target.dtype:
        return array
    return turn(turned, jnp.dtype(target.dtype), sharding)(array)


@functools.lru_cache(maxsize=64)
def turn(turned: bool, dtype: Any, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    """The device program that moves the input axis to the front and converts."""
    return jax.jit(lambda x: (jnp.moveaxis(x, -1, 0) if turned else x).astype(dtype), out_shardings=sharding)


def merge(config: ModelConfig, leaf: str, index: Index, read: Read) -> np.ndarray:
    """The slice `index` of a parameter in the file's order; of a merged one, its parts in groups of rows."""
    if leaf not in config.merged:
        return read("", index)
    sizes, rows, rest = config.merged[leaf], index[0], index[1:]
    group = sum(sizes.values())
    if rows.start % group or rows.stop % group:
        raise UserError(f"the mesh cuts through a group of {leaf}: its size must divide the number of groups")
    first, last = rows.start // group, rows.stop // group

    def groups(part: str, size: int) -> np.ndarray:
        x = read(part, (slice(first * size, last * size), *rest))
        return x.reshape(last - first, size, *x.shape[1:])

    x = np.concatenate([groups(part, size) for part, size in sizes.items()], axis=1)
    return x.reshape(-1, *x.shape[2:])
