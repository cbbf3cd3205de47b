"""Tensors of 4-bit integers in groups in a safetensors file: how they are found, and how parts of them are read.

A matrix NAME.weight [O, I] is stored as 32-bit words of eight integers each, with scales and perhaps zero points for
groups of inputs:

| method | integers | eight in a word | scales | zero points |
|---|---|---|---|---|
| compressed-tensors | NAME.weight_packed [O, I / 8] | inputs | NAME.weight_scale | NAME.weight_zero_point [O / 8, N] |
| gptq | NAME.qweight [I / 8, O] | inputs | NAME.scales [N, O] | NAME.qzeros [N, O / 8], less 1 |
| awq | NAME.qweight [I, O / 8] | outputs, reordered | NAME.scales [N, O] | NAME.qzeros [N, O / 8], reordered |

NAME.g_idx, or NAME.weight_g_idx, is the group of each input where groups do not consist of neighbours (act order).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from checkpoints.eight_bit_tensors import FLOATS, PACKED, SHAPE, At
from checkpoints.published import FOUR, Published
from checkpoints.reading import naming_file
from checkpoints.tensor_file import Index
from jaxspec.common.errors import UnsupportedError, UserError
from jaxspec.models.limits import short
from jaxspec.options.quantization import Quantization

WORD = 8  # number of integers in a word
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in an AWQ word of each of eight neighbouring outputs


@dataclasses.dataclass(frozen=True)
class Method:
    """The names and axes with which a method stores a matrix.

    integers, scales, zeros, groups: endings of the names of the tensors, after that of the module.
    turned: whether tensors are input-first.
    along: axis of the tensor of integers along which words hold eight of them.
    order: place in its word of each of eight neighbours.
    """

    integers: str
    scales: str
    zeros: str
    groups: str
    turned: bool
    along: int
    order: tuple[int, ...] = tuple(range(WORD))


METHODS = {
    "compressed-tensors": Method(
        f".weight{PACKED}", ".weight_scale", ".weight_zero_point", ".weight_g_idx", turned=False, along=1
    ),
    "gptq": Method(".qweight", ".scales", ".qzeros", ".g_idx", turned=True, along=0),
    "awq": Method(".qweight", ".scales", ".qzeros", ".g_idx", turned=True, along=1, order=AWQ_ORDER),
}


def unpacked(words: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(WORD))) -> np.ndarray:
    """Return the integers u8 of 32-bit words, eight along `axis` for each. order: place in its word of each of them."""
    moved = np.ascontiguousarray(np.moveaxis(words, axis, -1), "<i4").view(np.uint8)
    nibbles = np.stack([moved & 15, moved >> 4], axis=-1).reshape(*moved.shape[:-1], -1, WORD)
    return np.moveaxis(nibbles[..., order].reshape(*moved.shape[:-1], -1), -1, axis)


@dataclasses.dataclass(frozen=True)
class FourBits:
    """A matrix [O, I] (outputs, inputs) as a file stores it: 4-bit integers, quantised by group.

    where: path of the file, for messages.
    at: function that returns the slice object of a tensor of the file, by the tensor's name.
    module: name of the tensors without their endings.
    shape: shape of the matrix.
    form: form of the matrix; `form.scales` is the dtype of the scales in the file.
    method: the endings and axes of the file's tensors.
    less_one: whether the file's zero points are less by 1.
    order: i32[I], the inputs in the order of their groups; None if groups consist of neighbours.
    """

    where: str
    at: At
    module: str
    shape: tuple[int, ...]
    form: Quantization
    method: Method
    less_one: bool = False
    order: np.ndarray | None = None
    dtype: str = "F32"

    @property
    def names(self) -> set[str]:
        """The names of the tensors that hold the matrix, in the file or not."""
        m = self.method
        return {self.module + ending for ending in (m.integers, m.scales, m.zeros, m.groups, f".weight{SHAPE}")}

    def integers(self, index: Index) -> np.ndarray:
        """Read a slice of the integers u8, with the inputs in the order of their groups."""
        rows, columns = (slice(*s.indices(size)[:2]) for s, size in zip(index, self.shape, strict=True))
        wanted, along = [rows, columns if self.order is None else slice(0, self.shape[1])], self.method.along
        if self.method.turned:
            wanted.reverse()
        first, last = wanted[along].start, wanted[along].stop
        wanted[along] = slice(first // WORD, -(-last // WORD))
        with naming_file(self.where):
            words = self.at(self.module + self.method.integers)[tuple(wanted)]
            cut = [slice(None), slice(None)]
            cut[along] = slice(first % WORD, first % WORD + last - first)
            x = unpacked(words, along, self.method.order)[tuple(cut)]
        x = x.T if self.method.turned else x
        return np.ascontiguousarray(x if self.order is None else x[:, self.order][:, columns])

    def factor(self, field: str, i: int, index: Index) -> np.ndarray:
        """Return a slice [O, I / inputs] of the scales or zero points.

        field: "scale" or "zeros".
        Raises: UserError for scales that are 0 or not finite. Negative ones are read: AutoRound writes them.
        """
        name = self.module + (self.method.scales if field == "scale" else self.method.zeros)
        with naming_file(self.where):
            x: np.ndarray = self.at(name)[...]
        if field == "zeros":
            x = unpacked(x, 1, self.method.order).T if self.method.turned else unpacked(x, 0)[: self.shape[0]]
            return (x + self.less_one).astype(np.int8)[index]
        x = (x.T if self.method.turned else x).reshape(self.shape[0], -1)
        wide = x.astype(np.float32)
        if not (np.isfinite(wide) & (wide != 0)).all():
            raise UserError(f"{self.where}: tensor {name} holds scales that are 0 or not finite: fetch it again")
        return x[index]

    def read(self, index: Index) -> np.ndarray:
        """Read the slice `index`, dequantised to float32. Raises as `factor` does."""
        rows, columns = index
        everything = slice(None)
        scale = self.factor("scale", 0, (rows, everything)).astype(np.float32)
        zeros = self.factor("zeros", 0, (rows, everything)) if self.form.zeros else np.full(scale.shape, 8, np.int8)
        size = self.shape[1] // scale.shape[1]
        x = self.integers((rows, everything)).astype(np.float32) - zeros.repeat(size, 1)
        x = x * scale.repeat(size, 1)
        return np.ascontiguousarray((x if self.order is None else x[:, np.argsort(self.order)])[:, columns])


def find(
    where: str, shapes: Mapping[str, tuple[int, ...]], published: Published, at: At
) -> Iterator[tuple[str, FourBits]]:
    """Yield the matrices of 4 bits of a published checkpoint, with their names.

    where, at: as in `FourBits`.
    shapes: shapes of all tensors of the file.
    Raises: UserError for tensors that are missing or have wrong shapes; UnsupportedError for a dtype, or a last group
      with fewer inputs, that is not read.
    """
    method = METHODS.get(published.method)
    if method is None:
        return
    for stored in shapes:
        module = stored.removesuffix(method.integers)
        form = published.form(module) if module != stored else None
        if form is None and method.turned and module != stored:
            raise UserError(f"{where}: tensor {stored} is quantised, but config.json says it is not: fetch it again")
        if form is not None and form.dtype == FOUR:
            yield f"{module}.weight", matrix(where, module, form, shapes, published, at)


def matrix(
    where: str, module: str, form: Quantization, shapes: Mapping[str, tuple[int, ...]], published: Published, at: At
) -> FourBits:
    """Return the matrix of a module, whose tensors' shapes fit each other. Arguments and errors are those of `find`."""
    method = METHODS[published.method]
    integers, scales, zeros = (module + ending for ending in (method.integers, method.scales, method.zeros))
    for name in (integers, scales, *([zeros] if form.zeros else [])):
        if name not in shapes:
            raise UserError(f"{where}: tensor {name} is missing: fetch it again")
    for name, kinds in ((integers, ("I32",)), (scales, tuple(FLOATS)), (zeros, ("I32",))):
        if name in shapes and at(name).get_dtype() not in kinds:
            raise UnsupportedError(
                f"{where}: tensor {name} is stored as {at(name).get_dtype()}: {', '.join(kinds)} is read"
            )
    if len(shapes[integers]) != 2 or 0 in shapes[integers]:
        raise UserError(f"{where}: tensor {integers} has shape {shapes[integers]}, expected two sizes: fetch it again")
    sizes = [n * (WORD if axis == method.along else 1) for axis, n in enumerate(shapes[integers])]
    shape = tuple(reversed(sizes)) if method.turned else tuple(sizes)
    if module + ".weight" + SHAPE in shapes:  # words may be filled up with inputs that the matrix does not have
        own = tuple(map(int, at(module + ".weight" + SHAPE)[...].ravel()))
        if len(own) != 2 or own[0] != shape[0] or -(-own[1] // WORD) * WORD != shape[1]:
            raise UserError(
                f"{where}: tensor {integers} has shape {shapes[integers]}, which does not fit {module}.weight{SHAPE}="
                f"{short(own)} in 4 bits: fetch it again"
            )
        shape = own
    if shape[1] % (form.inputs or 1):
        raise UnsupportedError(
            f"{where}: {module} has {shape[1]} inputs, which groups of {form.inputs} do not divide: a last group with "
            "fewer inputs is not read; take the unquantised model with quantization='int8'"
        )
    rows, groups = shape[0], shape[1] // (form.inputs or shape[1])
    expected = {scales: [(groups, rows)] if method.turned else [(rows, groups), *[(rows,)] * (groups == 1)]}
    if form.zeros:
        expected[zeros] = [(groups, rows // WORD) if method.turned else (-(-rows // WORD), groups)]
    for name, known in expected.items():
        if shapes[name] not in known:
            raise UserError(
                f"{where}: tensor {name} has shape {shapes[name]}, expected {known[0]} ({module} has shape {shape}): "
                "fetch it again"
            )
    form = dataclasses.replace(form, scales=FLOATS[at(scales).get_dtype()])
    less_one = published.method == "gptq" and not published.zeros_as_they_are
    found = FourBits(
        where,
        at,
        module,
        shape,
        form,
        method,
        less_one,
        order(where, module + method.groups, shapes, at, form, shape[1]),
    )
    if method.turned and not form.zeros and zeros in shapes:
        with naming_file(where):
            stored = found.factor("zeros", 0, (slice(None), slice(None)))
        if (stored != WORD).any():
            raise UserError(
                f"{where}: tensor {zeros} is not 8 everywhere, but config.json says symmetric: fetch it again"
            )
    return found


def order(
    where: str, name: str, shapes: Mapping[str, tuple[int, ...]], at: At, form: Quantization, inputs: int
) -> np.ndarray | None:
    """Return the indices of the inputs, sorted by group; None if each group is a run of consecutive inputs.

    name: name of the tensor with each input's group.
    inputs: number of inputs of the matrix.
    Raises: UserError unless it has a group for each input, and each group has the size that the form says.
    """
    if name not in shapes or not form.inputs:
        return None
    if shapes[name] != (inputs,):
        raise UserError(f"{where}: tensor {name} has shape {shapes[name]}, expected {(inputs,)}: fetch it again")
    with naming_file(where):
        groups = np.asarray(at(name)[...])
    if (groups == -1).all():  # the tensor as it is initialised, before any order is stored in it
        return None
    expected = np.arange(inputs) // form.inputs
    if (groups == expected).all():
        return None
    found = np.argsort(groups, kind="stable").astype(np.int32)
    if not np.array_equal(groups[found], expected):
        raise UserError(f"{where}: tensor {name} does not have {form.inputs} inputs in each group: fetch it again")
    return found
