"""The device side of an engine: parameters, caches, programs. It runs what the engine planned; it knows no request.

Of several processes that of rank 0 has the engine, and tells its plans to the others' runners before it runs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.profiler import TraceAnnotation

from jaxspec.cache.pages import PagedKVCache, allocate
from jaxspec.decode.state import DecodeConfig
from jaxspec.engine import setup
from jaxspec.models.decoder import Params, parameters
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.models.storage import stored_for
from jaxspec.options.engine import EngineConfig
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.peers import Peers
from jaxspec.parallel.placement import Placement
from jaxspec.runtime import wire
from jaxspec.runtime.packing import Packed, pack
from jaxspec.runtime.plans import Plan
from jaxspec.runtime.programs import Programs
from pallas_kernels.device import Device

RENEW = Plan("renew")


def fetch(result: Packed) -> Any:
    """The one transfer from device to host of a launch. What failed on the device fails here."""
    return jax.device_get(result).unpack()


def wait(result: Packed) -> None:
    """Until the device has done what was started. What failed there fails here."""
    jax.block_until_ready(result)


def lent(models: Mapping[str, Model], places: Mapping[str, Placement]) -> dict[str, jax.Array]:
    """Of the target's tables those that a head beside it reads, in a copy that lies as the draft does; none where the
    two lie alike."""
    if not setup.features_width(models):
        return {}
    target, draft = models["target"], models["draft"].config
    if places["draft"].degree == places["target"].degree:
        return {}
    tables = () if getattr(draft, "has_table", False) else ("embed", "embed_in")
    wanted = lambda name, p: name in tables or (p.head and draft_spec(draft).borrows_head)
    return {
        name: jax.device_put(target.params[name], places["draft"].of_parameter(p.axes, p.shape))
        for name, p in parameters(target.config).items()
        if wanted(name, p)
    }


class Runner:
    """Runs plans. models: "target" and, for a method that has one, "draft"."""

    def __init__(
        self,
        models: dict[str, Model],
        config: EngineConfig,
        speculative: SpeculativeConfig | None,
        placement: Placement,
        device: Device,
        programs: Programs,
        peers: Peers | None = None,
    ) -> None:
        self.paged = paged = setup.paged_models(models, config, speculative, placement, device)
        self.placement = placement
        self.configs = {name: model.config for name, model in models.items()}
        self.params: dict[str, Any] = {}
        for name, model in models.items():
            self.use(name, model.params)
        if tables := lent(models, setup.placements(models, placement)):
            self.params["lent"] = tables
        self.layouts = setup.cache_layouts(paged, models["target"].dtype)
        self.cache = self.empty_cache()
        # For programs that are made while a launch takes the caches: an array that is gone has no layout any more.
        self.pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.format), self.cache)
        self.drafters = setup.drafters(speculative, paged)
        drafter = self.drafters[max(self.drafters)]
        if "draft" not in self.params and drafter and (own := drafter.parameters()) is not None:
            self.params["draft"] = jax.device_put(own, placement.sharding())
        self.decoding = DecodeConfig(
            target=paged["target"],
            drafter=drafter,
            reader=drafter if drafter and drafter.features_width else None,
            greedy_draft=speculative is not None and speculative.draft_sample_method == "greedy",
        )
        self.programs, self.peers = programs, peers
        self.draft_cost = setup.draft_cost(models)

    def use(self, name: str, params: Params) -> None:
        """The model `name` has these parameters from now on."""
        self.params[name] = stored_for(self.paged[name].backend, self.configs[name], dict(params))

    def start(self, plan: Plan) -> Packed:
        """Has the device run a plan behind what it was told before -> what comes back: `fetch` waits for it."""
        packed = plan.arrays if isinstance(plan.arrays, Packed) else pack(plan.arrays)
        with TraceAnnotation(plan.program), self.together():
            self.tell(plan, packed)
            config = self.config(plan)
            self.cache, result = self.programs.run(plan.program, config, self.params, self.cache, packed)
        return result

    def fetch(self, result: Packed) -> Any:
        with self.together():
            return fetch(result)

    def wait(self, result: Packed) -> None:
        with self.together():
            wait(result)

    def tell(self, plan: Plan, packed: Packed) -> None:
        if self.peers is not None:
            self.peers.tell(wire.to_bytes(plan, packed))

    def together(self) -> AbstractContextManager[None]:
        """What a device does is done by those of all processes, and what fails on one fails for all."""
        return contextlib.nullcontext() if self.peers is None else self.peers.together()

    def execute(self, told: bytes) -> None:
        """Does what another process does, too."""
        plan = wire.from_bytes(told)
        if plan.program == RENEW.program:
            self.renew()
        else:
            self.start(plan)

    def begin(self, plan: Plan) -> None:
        """Lower the plan's program, and run nothing. For any thread, as `compile`."""
        self.programs.begin(*self.described(plan))

    def compile(self, plan: Plan) -> None:
        """Make the plan's program, and run nothing."""
        self.programs.compile(*self.described(plan))

    def described(self, plan: Plan) -> tuple[str, DecodeConfig | None, Any, Any, Packed]:
        """What its program is made for."""
        return plan.program, self.config(plan), self.params, self.pages, pack(plan.arrays)

    def config(self, plan: Plan) -> DecodeConfig | None:
        """The static description of the plan's program."""
        if plan.program == "copy_pages":
            return None
        drafter = self.decoding.drafter if plan.program == "catch_up" else self.drafters[plan.k]
        return dataclasses.replace(self.decoding, variant=plan.variant, drafter=drafter)

    def empty_cache(self) -> PagedKVCache:
        places = setup.placements(self.layouts, self.placement)
        return PagedKVCache(**{name: allocate(layout, places[name]) for name, layout in self.layouts.items()})

    @property
    def lost(self) -> bool:
        """Whether a program that did not end has taken the caches."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.cache))

    def renew(self) -> None:
        """Empty caches in place of what is there."""
        self.tell(RENEW, pack(()))
        for leaf in jax.tree.leaves(self.cache):
            if not leaf.is_deleted():
                leaf.delete()  # before new pages take the same space
        self.cache = self.empty_cache()
