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
from jaxspec.errors import UnsupportedError, UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.parameters import Parameter
from jaxspec.progress import byte_progress

Index = tuple[slice, ...]
Read = Callable[[str, Index], np.ndarray]


class TensorFile(Protocol):
    """What a format offers: names and shapes at no cost, and slices of one tensor."""

    where: str  # for messages

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, index: Index) -> np.ndarray: ...


def stored_shape(config: ModelConfig, parameter: Parameter, part: str) -> tuple[int, ...]:
    """The shape that a file's tensor must have to be `part` of a parameter, or all of it."""
    if not part:
        return parameter.shape[::-1] if parameter.kind == "matrix" else parameter.shape
    columns = dict(parameter.parts)
    rows = parameter.shape[-1] * columns[part] // sum(columns.values())
    return (rows // copies(config, part), *parameter.shape[:-1])


def copies(config: ModelConfig, part: str) -> int:
    """How often each group of a file's rows stands in the parameter: of keys and values `kv_copies` times."""
    return config.kv_copies if part in ("k", "v") else 1


def copying(config: ModelConfig, parameter: Parameter, read: Read) -> Read:
    """read, as if each group of a part's rows stood in the file as often as in the parameter."""
    sizes = dict(parameter.parts)

    def copied(part: str, index: Index) -> np.ndarray:
        if (n := copies(config, part)) == 1:
            return read(part, index)
        rows, size = index[0], sizes[part]
        first, last = rows.start // size, rows.stop // size
        x = read(part, (slice(first // n * size, -(-last // n) * size), *index[1:]))
        groups = np.repeat(x.reshape(-1, size, *x.shape[1:]), n, axis=0)[first % n :][: last - first]
        return groups.reshape(-1, *x.shape[1:])

    return copied


def check(config: ModelConfig, abstract: Mapping[str, Parameter], table: Table, file: TensorFile) -> None:
    """Compares what the file holds with what the model needs, before anything is read.

    Raises: UserError that names the first tensor that is missing, of a wrong shape, or not part of the model.
    """
    found, used = file.shapes(), set()
    for where, parameter in abstract.items():
        for part, name in table.sources(where).items():
            expected = stored_shape(config, parameter, part)
            if name not in found:
                raise UserError(f"{file.where}: tensor {name} is missing (the model needs it for {where})")
            if found[name] != expected:
                raise UserError(f"{file.where}: tensor {name} has shape {found[name]}, expected {expected}")
            used.add(name)
    if config.tied:  # some files repeat the embedding table as a head
        used |= set(table.sources("head").values())
    if extra := table.unknown(found, used):
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        kind = f"a {config.family} model" if config.method == "draft_model" else f"a head of method {config.method!r}"
        raise UserError(f"{file.where}: tensor {extra[0]}{more} is not part of {kind}")


def check_head(config: ModelConfig, table: Table, file: TensorFile) -> None:
    """Raises UnsupportedError where the file of a tied model has a head that is not its table: some versions of
    transformers would take it, others not. Some rows are compared: one that was trained differs in all."""
    table_name, head = (table.sources(where).get("", "") for where in ("embed", "head"))
    shapes = file.shapes()
    if not config.tied or head not in shapes:
        return
    same = shapes[head] == shapes[table_name]
    for row in np.linspace(0, shapes[head][0] - 1, 64 if same else 0).astype(int).tolist():
        index = (slice(row, row + 1), slice(0, shapes[head][1]))
        same &= np.array_equal(file.read(head, index), file.read(table_name, index))
    if not same:
        raise UnsupportedError(
            f"{file.where}: tie_word_embeddings is true, but tensor {head} is not the table {table_name}: say false in "
            "config.json where the head is meant, or take it out"
        )


def assemble(
    config: ModelConfig,
    abstract: Mapping[str, Parameter],
    table: Table,
    file: TensorFile,
    *,
    edit: Callable[[Parameter, str, np.ndarray], np.ndarray],
    progress: bool = True,
) -> dict[str, jax.Array]:
    """Every parameter of `abstract`, read from `file`, with the dtype and sharding that `abstract` asks for.

    edit(parameter, part, rows): undoes what the format did to values or rows; it sees whole heads of q and k.
    Raises: UserError as `check` does; UnsupportedError for integers where numbers are stored, or the other way.
    """
    check(config, abstract, table, file)
    check_head(config, table, file)
    params: dict[str, jax.Array] = {}
    total = sum(parameter.nbytes for parameter in abstract.values())
    with byte_progress("loading weights", total, enabled=progress) as advance:
        for where, parameter in abstract.items():
            names = table.sources(where)

            def read(part: str, index: Index, names=names, parameter=parameter) -> np.ndarray:
                x = file.read(names[part], index)
                if (parameter.kind == "ids") != (x.dtype.kind in "iub"):
                    needed = "integers are" if parameter.kind == "ids" else "floating point is"
                    raise UnsupportedError(f"{file.where}: tensor {names[part]} is stored as {x.dtype}: {needed} read")
                return edit(parameter, part, x)

            params[where] = place(where, parameter, copying(config, parameter, read))
            advance(parameter.nbytes)
    return params


def place(where: str, parameter: Parameter, read: Read) -> jax.Array:
    """One parameter: read in the file's order by each device's part, then turned and converted on the devices."""
    turned = parameter.kind == "matrix"  # tables and vectors are stored as they are
    sharding = parameter.sharding or SingleDeviceSharding(jax.devices()[0])
    shape, stored = parameter.shape, sharding
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
            pieces[key] = merge(where, parameter, index, read)
        return pieces[key]

    array = jax.make_array_from_callback(shape, stored, piece)
    if not turned and array.dtype == parameter.dtype:
        return array
    return turn(turned, jnp.dtype(parameter.dtype), sharding)(array)


@functools.lru_cache(maxsize=64)
def turn(turned: bool, dtype: Any, sharding: Any) -> Callable[[jax.Array], jax.Array]:
    """The device program that moves the input axis to the front and converts."""
    return jax.jit(lambda x: (jnp.moveaxis(x, -1, 0) if turned else x).astype(dtype), out_shardings=sharding)


def merge(where: str, parameter: Parameter, index: Index, read: Read) -> np.ndarray:
    """The slice `index` of a parameter in the file's order; of a merged one, its parts in groups of rows."""
    if not parameter.parts:
        return read("", index)
    sizes, rows, rest = dict(parameter.parts), index[0], index[1:]
    group = sum(sizes.values())
    if rows.start % group or rows.stop % group:
        raise UserError(f"the mesh cuts through a group of {where}: its size must divide the number of groups")
    first, last = rows.start // group, rows.stop // group

    def groups(part: str, size: int) -> np.ndarray:
        x = read(part, (slice(first * size, last * size), *rest))
        return x.reshape(last - first, size, *x.shape[1:])

    x = np.concatenate([groups(part, size) for part, size in sizes.items()], axis=1)
    return x.reshape(-1, *x.shape[2:])
