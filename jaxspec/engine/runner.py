"""The device side of an engine: parameters, KV caches, compiled programs. It runs the engine's plans.

A plan is one run of a device program with its arguments. The runner does not know requests. In a job of several
processes the engine is in process 0, whose runner sends each plan to the other processes' runners before it runs it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.profiler import TraceAnnotation

from jaxspec.cache.pages import PagedKVCache, allocate
from jaxspec.decode.state import DecodeConfig
from jaxspec.engine import assembly
from jaxspec.models.decoder import Params, compute_dtype, parameters
from jaxspec.models.draft_spec import draft_spec
from jaxspec.models.model import Model
from jaxspec.models.storage import stored_for
from jaxspec.options.engine import EngineConfig
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.mailbox import NAMES, mailboxes, out_of_step
from jaxspec.parallel.peers import Peers
from jaxspec.parallel.placement import Placement
from jaxspec.runtime import wire
from jaxspec.runtime.packing import Packed, pack
from jaxspec.runtime.plans import Plan
from jaxspec.runtime.programs import Programs
from jaxspec.sampling.processors.grammar import empty_pool, pool_shape
from pallas_kernels.device import Device
from pallas_kernels.weights import shardings

RENEW = Plan("renew")


def fetch(result: Packed) -> Any:
    """Transfer a program's result from device to host, in one transfer. Raise the error if the program failed."""
    return jax.device_get(result).unpack()


def wait(result: Packed) -> None:
    """Wait until the device has computed this result. Raise the error if the program failed."""
    jax.block_until_ready(result)


def shared_tables(models: Mapping[str, Model], places: Mapping[str, Placement]) -> dict[str, jax.Array]:
    """Return copies, with the draft's sharding, of the target's parameters that a draft head reads, by name.

    These are embedding table and output head, each only if the draft head has none of its own. Return no copies if
    target and draft are sharded over the same number of devices: the draft head then reads the target's own arrays.
    """
    if not assembly.features_width(models):
        return {}
    target, draft = models["target"], models["draft"].config
    if places["draft"].degree == places["target"].degree:
        return {}
    tables = () if getattr(draft, "has_table", False) else ("embed", "embed_in")
    uses_target_head = draft_spec(draft).uses_target_head
    copies = {}
    for name, parameter in parameters(target.config).items():
        if name in tables or (parameter.head and uses_target_head):
            place = places["draft"].of_parameter(parameter.axes, parameter.shape)
            copies[name] = jax.device_put(target.params[name], shardings(target.params[name], place))
    return copies


class Runner:
    """A runner of plans, with parameters and caches. models: "target" and, if the drafting method has one, "draft"."""

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
        self.paged = paged = assembly.paged_models(models, config, speculative, placement, device)
        self.placement = placement
        self.configs = {name: model.config for name, model in models.items()}
        self.params: dict[str, Any] = {}
        for name, model in models.items():
            self.use(name, model.params)
        if tables := shared_tables(models, assembly.placements(models, placement)):
            self.params["shared"] = tables
        self.layouts = assembly.cache_layouts(paged, models["target"].dtype)
        self.cache = self.empty_cache()
        # Shapes and layouts of the caches, kept because programs are also compiled while a launch owns the donated
        # caches, whose layout cannot be read then.
        self.pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.format), self.cache)
        self.drafters = assembly.drafters(speculative, paged)
        self.method = assembly.method_of(speculative, paged)[1] if speculative else None
        drafter = self.drafters[max(self.drafters)]
        if "draft" not in self.params and drafter and (own := drafter.parameters()) is not None:
            self.params["draft"] = jax.device_put(own, placement.sharding())
        self.decoding = DecodeConfig(
            target=paged["target"],
            drafter=drafter,
            reader=drafter if drafter and drafter.features_width else None,
            greedy_draft=speculative is not None and speculative.draft_sample_method == "greedy",
        )
        self.grammar_shape = pool_shape(config.grammar_pool_mib, placement.sharding())
        self.grammars: jax.Array | None = None  # the pool of grammars' tables, allocated when it is first used
        self.programs = programs
        self.peers = peers
        self.draft_cost = assembly.draft_cost(models)

    def use(self, name: str, params: Params) -> None:
        """Replace the parameters of a model. name: "target" or "draft"."""
        stored = stored_for(self.paged[name].backend, self.configs[name], dict(params))
        self.params[name] = {**stored, **self.mailboxes(name, params)}

    def mailboxes(self, name: str, params: Params) -> dict[str, jax.Array]:
        """Return new mailboxes for a model's sums over two GPUs; none where the compiler computes these sums."""
        backend, config = self.paged[name].backend, self.configs[name]
        if backend.placement is None or backend.kernels == "reference":
            return {}
        sizes = {"width": config.width, "vocab_size": config.vocab_size}
        return mailboxes(backend.placement, backend.device, compute_dtype(params), **sizes)

    def start(self, plan: Plan) -> Packed:
        """Start a plan on the device, which runs plans in order. Return its result, which may not be computed yet."""
        packed = plan.arrays if isinstance(plan.arrays, Packed) else pack(plan.arrays)
        with TraceAnnotation(plan.program), self.together():
            self.send(plan, packed)
            config = self.config(plan)
            result: Packed
            if plan.program == "write_grammar":
                self.grammars, result = self.programs.run(plan.program, config, {}, self.grammar_tables(), packed)
            else:
                params = self.with_grammars(plan, self.grammar_tables)
                self.cache, result = self.programs.run(plan.program, config, params, self.cache, packed)
        return result

    def grammar_tables(self) -> jax.Array:
        """Return the pool of grammars' tables, allocated if this is its first use."""
        if self.grammars is None:
            self.grammars = empty_pool(self.grammar_shape)
        return self.grammars

    def with_grammars(self, plan: Plan, tables: Callable[[], Any]) -> dict[str, Any]:
        """Return the parameters of a plan's program, with the tables of grammars if the program reads them."""
        return {**self.params, "grammars": tables()} if plan.variant.grammars else self.params

    def fetch(self, result: Packed) -> Any:
        """Transfer a plan's result to the host, as the module's function `fetch` does."""
        with self.together():
            return fetch(result)

    def wait(self, result: Packed) -> None:
        """Wait for a plan's result, as the module's function `wait` does."""
        with self.together():
            wait(result)

    def send(self, plan: Plan, packed: Packed) -> None:
        """Send a plan and its packed arrays to the job's other processes, if there are any."""
        if self.peers is not None:
            self.peers.send_plan(wire.to_bytes(plan, packed))

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which an error ends all processes of the job, since none can run the programs alone."""
        return contextlib.nullcontext() if self.peers is None else self.peers.together()

    def execute(self, message: bytes) -> None:
        """Run the plan in a message that process 0 sent."""
        plan = wire.from_bytes(message)
        if plan.program == RENEW.program:
            self.renew()
        else:
            self.start(plan)

    def begin(self, plan: Plan) -> None:
        """Lower the plan's program without running it. May be called from any thread."""
        self.programs.begin(*self.program_arguments(plan))

    def compile(self, plan: Plan) -> None:
        """Compile the plan's program without running it. May be called from any thread."""
        self.programs.compile(*self.program_arguments(plan))

    def program_arguments(self, plan: Plan) -> tuple[str, DecodeConfig | None, Any, Any, Packed]:
        """Return the arguments that the plan's program is compiled for."""
        packed = pack(plan.arrays)
        if plan.program == "write_grammar":
            return plan.program, None, {}, self.grammar_shape, packed
        params = self.with_grammars(plan, lambda: self.grammar_shape)
        return plan.program, self.config(plan), params, self.pages, packed

    def config(self, plan: Plan) -> DecodeConfig | None:
        """Return the static configuration of the plan's program; None for one that uses no caches."""
        if plan.program == "write_grammar":
            return None
        drafter = self.decoding.drafter if plan.program == "catch_up" else self.drafters[plan.k]
        words = self.grammar_shape.size if plan.variant.grammars else 0
        return dataclasses.replace(self.decoding, variant=plan.variant, drafter=drafter, grammar_words=words)

    def empty_cache(self) -> PagedKVCache:
        places = assembly.placements(self.layouts, self.placement)
        return PagedKVCache(**{name: allocate(layout, places[name]) for name, layout in self.layouts.items()})

    @property
    def lost(self) -> bool:
        """Return whether the caches' arrays are deleted, because a program that they were donated to failed."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves((self.cache, self.grammars)))

    def out_of_step(self) -> bool:
        """Return whether a mailbox is useless until `renew`, because a GPU has waited for the other's sums in vain."""
        return any(map(out_of_step, self.params.values()))

    def renew(self) -> None:
        """Replace caches and mailboxes by empty ones, and drop the tables of grammars, in all processes of the job."""
        self.send(RENEW, pack(()))
        for leaf in jax.tree.leaves((self.cache, self.grammars)):
            if not leaf.is_deleted():
                leaf.delete()  # frees the memory that the new pages need
        self.grammars = None
        self.cache = self.empty_cache()
        for name in self.configs:  # a program that failed may have made more calls on one GPU than on the other
            others = {key: x for key, x in self.params[name].items() if key not in NAMES}
            self.params[name] = {**others, **self.mailboxes(name, others)}
