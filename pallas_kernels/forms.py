"""The forms of an op, and which of them runs where.

An op is a folder: `__init__.py` with its signature and its forms, and a file a form with a function of the op's name.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import device as devices
from pallas_kernels.device import Device
from pallas_kernels.weights import Weight

Where = str | Device | None  # "cpu", "gpu", "tpu" or a device; None: the default backend's
IMPLEMENTATIONS = ("reference", "pallas")


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to compute an op: the function of the op's name in its file `module`.

    name: "reference", "streamed" or "pallas".
    platforms: where it runs. Its module may have `READS`, the forms of weights that it reads besides plain arrays
      (without it, all of them), and a function `fits` of the same arguments, which says whether it covers them, and is
      meant for them.
    best_on: where it is the best that is known, for what fits.
    devices: which of the platforms' devices have what it needs.
    wants: which of "device" and "implementation" it is given as options: an op that is made of ops hands both on.
    """

    name: str
    module: str
    platforms: tuple[str, ...]
    best_on: tuple[str, ...] = ()
    devices: Callable[[Device], bool] = lambda device: True
    wants: tuple[str, ...] = ("device",)


def plain(*wants: str) -> Form:
    """The op in plain jnp, for all that no other form takes."""
    return Form("reference", "reference", devices.NAMES, devices.NAMES, wants=wants)


def streamed(*wants: str) -> Form:
    """Plain jnp, too, ordered for a CPU's caches."""
    return Form("streamed", "cpu", ("cpu",), ("cpu",), wants=wants)


def triton(*, best: bool = False) -> Form:
    return Form("pallas", "gpu", ("gpu",), ("gpu",) if best else (), lambda device: device.has_triton)


def mosaic(*, best: bool = False) -> Form:
    """On TPU; on CPU it is interpreted."""
    return Form("pallas", "tpu", ("tpu", "cpu"), ("tpu",) if best else ())


@dataclasses.dataclass(frozen=True)
class Op:
    """An op by name, and its forms, of which the first that is asked for and fits is taken; the last takes all."""

    name: str
    forms: tuple[Form, ...]

    def run(self, implementation: str | None, platform: Where, *args: Any, **options: Any) -> Any:
        """Calls the form that is chosen."""
        device = devices.named(platform)
        form = self.choose(implementation, device, *args, **options)
        given = {"device": device, "implementation": implementation}
        return call(self.name, form.module, *args, **options, **{name: given[name] for name in form.wants})

    def choose(self, implementation: str | None, device: Device, *args: Any, **options: Any) -> Form:
        """For these arguments; without them, for any that fit.

        implementation: None (the best known), "reference", or "pallas": a kernel wherever there is one, else the last.
        """
        if implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(f"{self.name}: implementation {implementation!r} is not one of {(None, *IMPLEMENTATIONS)}")
        for form in self.forms:
            if implementation is None:
                asked = device.platform in form.best_on
            else:
                asked = form.name == implementation and device.platform in form.platforms
            if asked and form.devices(device) and (not args or self.fits(form, device, *args, **options)):
                return form
        return self.forms[-1]

    def fits(self, form: Form, device: Device, *args: Any, **options: Any) -> bool:
        """Return whether a form covers these arguments and is meant for them."""
        file = module(self.name, form.module)
        reads, check = getattr(file, "READS", None), getattr(file, "fits", None)
        if reads is not None and any(isinstance(arg, Weight) and arg.form not in reads for arg in args):
            return False
        return check is None or check(*args, device=device, **options)


def call(op: str, name: str, *args: Any, **options: Any) -> Any:
    """`op` by its file `name`. All layers of a program that call it alike share what is traced and lowered: for a
    kernel on GPU that takes longer than compiling it."""
    return shared(op, name, tuple(options))(*args, **options)


@functools.cache
def shared(op: str, name: str, options: tuple[str, ...]) -> Callable:
    return lowered_once(*options)(function(op, name))


def lowered_once(*static: str) -> Callable[[Callable], Callable]:
    """Decorates what calls a kernel for several ops, or cases of one: a program lowers it once for all calls that are
    alike."""
    return functools.partial(jax.jit, static_argnames=static)


def module(op: str, name: str) -> Any:
    """pallas_kernels/<op>/<name>.py, imported only when it is used."""
    return importlib.import_module(f"{__package__}.{op}.{name}")


def function(op: str, name: str) -> Callable:
    return getattr(module(op, name), op)


def check_shape(op: str, name: str, array: jax.Array | Weight, *shape: int) -> None:
    """Raises ValueError unless `array` has this shape."""
    if array.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {shape} to fit the other arguments, not {array.shape}")
