"""A TPU to compile for, without a TPU: libtpu brings the real compiler."""

import functools
import importlib.util
import os

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.support.compilation_cache import no_compilation_cache

# Several test processes may load libtpu, and none of them should look for a TPU host's metadata server.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

# name -> chips of one host; a single chip is a topology of its own only with these bounds given
CHIPS_PER_HOST = {"v5e:1x1": (1, 1, 1), "v6e:1x1": (1, 1, 1)}


@functools.cache
def tpu_mesh(name: str, axis: str = "model") -> Mesh:
    """All chips of the topology `name` ("v5e:1x1", "v6e:2x2", ...) on one mesh axis. Skips where libtpu is missing."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU compiler, is not installed: pip install jax[tpu]")
    from jax.experimental import topologies

    bounds = {"chips_per_host_bounds": CHIPS_PER_HOST[name]} if name in CHIPS_PER_HOST else {}
    topology = topologies.get_topology_desc(topology_name=name, platform="tpu", **bounds)
    return Mesh(np.array(topology.devices), (axis,), axis_types=(AxisType.Auto,))


def tpu_sharding(name: str, *spec: str | None) -> NamedSharding:
    """The sharding of an argument over the topology `name`; replicated unless `spec` names the axis."""
    return NamedSharding(tpu_mesh(name), PartitionSpec(*spec))


def tpu_compile(name: str, function, *shapes, donate_argnums=(), **jit_options) -> jax.stages.Compiled:
    """Compiles `function` for the topology `name`. `shapes` are ShapeDtypeStructs (or trees of them); those without a
    sharding are replicated. Kernels inside need the mesh around their lowering, which is why this function exists."""
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or tpu_sharding(name))
    with jax.sharding.use_abstract_mesh(tpu_mesh(name).abstract_mesh), no_compilation_cache():
        jitted = jax.jit(function, donate_argnums=donate_argnums, **jit_options)
        return jitted.lower(*jax.tree.map(place, shapes)).compile()
