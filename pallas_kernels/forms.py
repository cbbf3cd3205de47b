"""The forms (implementations) of an op, and the choice among them.

An op is a folder of this package. The folder's `__init__.py` defines the op's public function and lists its forms. Each
form has a file in the folder, with a function that has the op's name.
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

DeviceLike = str | Device | None  # name of a platform, or a device; None for JAX's default backend
IMPLEMENTATIONS = ("reference", "pallas")


def every_device(device: Device) -> bool:
    """Return True. This is the predicate `Form.devices` for a form that runs on every device of its platforms."""
    return True


@dataclasses.dataclass(frozen=True)
class Form:
    """One implementation of an op: the function with the op's name in a module of the op's folder.

    The module may define `READS`, the forms of weights (`Weight.form`) that the function reads besides plain arrays.
    Without `READS` the function reads all forms of weights. The module may also define a function `fits` with the
    arguments of the form's function, and always `device`. It returns whether the implementation supports these
    arguments and is meant for them.

    name: "reference" (plain jnp), "streamed" (plain jnp that suits a CPU's caches) or "pallas" (a kernel).
    module: the name of the module.
    platforms: the platforms on which the form runs.
    best_on: the platforms on which the form is the best known one, for arguments that `fits` accepts.
    devices: predicate that returns whether a device of these platforms has the abilities that the form needs.
    wants: the options among "device" and "implementation" that the function receives. A form that calls other ops
      receives both and passes them on.
    """

    name: str
    module: str
    platforms: tuple[str, ...]
    best_on: tuple[str, ...] = ()
    devices: Callable[[Device], bool] = every_device
    wants: tuple[str, ...] = ("device",)


def plain(*wants: str) -> Form:
    """Return the form in plain jnp, which is used if it is requested or if no other form can be. wants: see `Form`."""
    return Form("reference", "reference", devices.NAMES, devices.NAMES, wants=wants)


def streamed(*wants: str) -> Form:
    """Return the form in plain jnp whose order of operations suits a CPU's caches. wants: see `Form`."""
    return Form("streamed", "cpu", ("cpu",), ("cpu",), wants=wants)


def triton(*, best: bool = False) -> Form:
    """Return the form that is a Triton kernel for GPUs. best: whether it is the best known form on GPUs."""
    return Form("pallas", "gpu", ("gpu",), ("gpu",) if best else (), devices=lambda device: device.has_triton)


def mosaic(*, best: bool = False) -> Form:
    """Return the form that is a Mosaic kernel for TPU, interpreted on CPU. best: whether it is the best form on TPU."""
    return Form("pallas", "tpu", ("tpu", "cpu"), ("tpu",) if best else ())


@dataclasses.dataclass(frozen=True)
class Op:
    """An op: its name, and its forms (implementations).

    The first form that is requested, runs on the device and supports the arguments is used. If there is none, the last
    form is used, which supports all arguments.
    """

    name: str
    forms: tuple[Form, ...]

    def run(self, implementation: str | None, platform: DeviceLike, *args: Any, **options: Any) -> Any:
        """Call the op: the form that `choose` returns for these arguments."""
        device = devices.named(platform)
        form = self.choose(implementation, device, *args, **options)
        given = {"device": device, "implementation": implementation}
        return call(self.name, form.module, *args, **options, **{name: given[name] for name in form.wants})

    def choose(self, implementation: str | None, device: Device, *args: Any, **options: Any) -> Form:
        """Return the form to use for these arguments.

        If no arrays are given, return the form that is used for arguments that it supports.

        Args:
          implementation: None for the best known form, "reference" for plain jnp, "pallas" for the kernel if there is
            one for the device and these arguments, else the last form.
          device: the device that the program is compiled for.
          *args: arrays, the positional arguments of the form's function.
          **options: keyword arguments of the form's function.

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
        """Return whether a form supports these arguments and is meant for them."""
        file = module(self.name, form.module)
        reads = getattr(file, "READS", None)
        check = getattr(file, "fits", None)
        if reads is not None and any(isinstance(arg, Weight) and arg.form not in reads for arg in args):
            return False
        return check is None or check(*args, device=device, **options)


def call(op: str, name: str, *args: Any, **options: Any) -> Any:
    """Call the form of an op that is in the module `name` of the op's folder.

    Within an XLA program, all calls with the same shapes and options share one traced and lowered function, because
    lowering a GPU kernel takes longer than compiling it.
    """
    return shared(op, name, tuple(options))(*args, **options)


@functools.cache
def shared(op: str, name: str, options: tuple[str, ...]) -> Callable[..., Any]:
    """Return the jitted function of a form. The result is cached, so that all calls share it.

    op, name: the op, and the form's module.
    options: names of the function's keyword arguments, which are static.
    """
    return lowered_once(*options)(function(op, name))


def lowered_once(*static: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a function that calls a kernel and is itself called by several ops, or often by one op.

    An XLA program lowers the function once for all calls with the same shapes and static arguments.

    static: names of the static arguments.
    """
    return functools.partial(jax.jit, static_argnames=static)


def module(op: str, name: str) -> Any:
    """Return the module pallas_kernels/<op>/<name>.py. It is imported at its first use."""
    return importlib.import_module(f"{__package__}.{op}.{name}")


def function(op: str, name: str) -> Callable[..., Any]:
    """Return the function of a form, without `jit`. op, name: the op, and the form's module."""
    result: Callable[..., Any] = getattr(module(op, name), op)
    return result


def check_shape(op: str, name: str, array: jax.Array | Weight, *shape: int) -> None:
    """Raise ValueError unless `array` has this shape. op, name: the op and its argument, for the message."""
    if array.shape != shape:
        raise ValueError(f"{op}: {name} must have shape {shape} to fit the other arguments, not {array.shape}")
