"""The forms of an op, which are its implementations, and the choice among them.

An op is a folder. Its `__init__.py` has the signature and lists the forms. Each form has a file with a function of the
op's name.
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

DeviceLike = str | Device | None  # "cpu", "gpu", "tpu" or a device; None: the default backend
IMPLEMENTATIONS = ("reference", "pallas")


def every_device(device: Device) -> bool:
    """Return True: the form needs nothing that a device of its platforms may lack."""
    return True


@dataclasses.dataclass(frozen=True)
class Form:
    """One implementation of an op: the function of the op's name in the file `module`.

    The module may define `READS`, the forms of weights that it reads besides plain arrays; without `READS` it reads all
    of them. It may also define a function `fits` of the same arguments, which returns whether the form covers these
    arguments and is meant for them.

    name: "reference", "streamed" or "pallas".
    module: the name of the file, without its suffix.
    platforms: the platforms on which the form runs.
    best_on: the platforms on which the form is the best known one for arguments that fit.
    devices: predicate on a device of these platforms: whether it has what the form needs.
    wants: the options among "device" and "implementation" that the form receives. An op made of other ops passes both
      of them on.
    """

    name: str
    module: str
    platforms: tuple[str, ...]
    best_on: tuple[str, ...] = ()
    devices: Callable[[Device], bool] = every_device
    wants: tuple[str, ...] = ("device",)


def plain(*wants: str) -> Form:
    """Return the form in plain jnp, for the arguments that no other form takes."""
    return Form("reference", "reference", devices.NAMES, devices.NAMES, wants=wants)


def streamed(*wants: str) -> Form:
    """Return the form in plain jnp whose order of operations suits a CPU's caches."""
    return Form("streamed", "cpu", ("cpu",), ("cpu",), wants=wants)


def triton(*, best: bool = False) -> Form:
    """Return the kernel for GPUs; best: it is the best form there."""
    return Form("pallas", "gpu", ("gpu",), ("gpu",) if best else (), devices=lambda device: device.has_triton)


def mosaic(*, best: bool = False) -> Form:
    """Return the kernel for TPU, interpreted on CPU; best: it is the best form on TPU."""
    return Form("pallas", "tpu", ("tpu", "cpu"), ("tpu",) if best else ())


@dataclasses.dataclass(frozen=True)
class Op:
    """An op's name and its forms. The first form that is requested and fits is used; the last takes all arguments."""

    name: str
    forms: tuple[Form, ...]

    def run(self, implementation: str | None, platform: DeviceLike, *args: Any, **options: Any) -> Any:
        """Call the form that `choose` returns for these arguments."""
        device = devices.named(platform)
        form = self.choose(implementation, device, *args, **options)
        given = {"device": device, "implementation": implementation}
        return call(self.name, form.module, *args, **options, **{name: given[name] for name in form.wants})

    def choose(self, implementation: str | None, device: Device, *args: Any, **options: Any) -> Form:
        """Return the form for these arguments; without arguments, the form for any that fit.

        Args:
          implementation: None (the best known form), "reference", or "pallas" (the kernel where there is one, else the
            last form).

        Raises:
          ValueError: an unknown implementation.
        """
        if implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(f"{self.name}: implementation {implementation!r} is not one of {(None, *IMPLEMENTATIONS)}")
        for form in self.forms:
            if implementation is None:
                requested = device.platform in form.best_on
            else:
                requested = form.name == implementation and device.platform in form.platforms
            if requested and form.devices(device) and (not args or self.fits(form, device, *args, **options)):
                return form
        return self.forms[-1]

    def fits(self, form: Form, device: Device, *args: Any, **options: Any) -> bool:
        """Return whether a form covers these arguments and is meant for them."""
        file = module(self.name, form.module)
        reads = getattr(file, "READS", None)
        check = getattr(file, "fits", None)
        if reads is not None and any(isinstance(arg, Weight) and arg.form not in reads for arg in args):
            return False
        return check is None or check(*args, device=device, **options)


def call(op: str, name: str, *args: Any, **options: Any) -> Any:
    """Call the form of an op in the file `name`.

    All calls in a program with the same shapes and options share one traced and lowered function: lowering a GPU kernel
    takes longer than compiling it.
    """
    return shared(op, name, tuple(options))(*args, **options)


@functools.cache
def shared(op: str, name: str, options: tuple[str, ...]) -> Callable:
    """Return the jitted function of a form, the same one for every call; options: the names of its options."""
    return lowered_once(*options)(function(op, name))


def lowered_once(*static: str) -> Callable[[Callable], Callable]:
    """Return a decorator for a function that calls a kernel and serves several ops, or several cases of one op.

    A program lowers the function once for all calls with the same shapes and static arguments.
    """
    return functools.partial(jax.jit, static_argnames=static)


def module(op: str, name: str) -> Any:
    """Return the module pallas_kernels/<op>/<name>.py, imported at its first use."""
    return importlib.import_module(f"{__package__}.{op}.{name}")


def function(op: str, name: str) -> Callable:
    """Return the function of a form, without `jit`."""
    return getattr(module(op, name), op)


def check_shape(op: str, name: str, array: jax.Array | Weight, *shape: int) -> None:
    """Raise ValueError unless `array` has this shape."""
    if array.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {shape} to fit the other arguments, not {array.shape}")
