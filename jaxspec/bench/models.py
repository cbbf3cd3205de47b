"""The models of the bench, their prompts, and engines with page pools that are just large enough."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

import checkpoints
from checkpoints.assemble import Keep
from jaxspec.bench import presets
from jaxspec.bench.bench_options import BenchOptions
from jaxspec.cache.budget import memory
from jaxspec.common.errors import UserError
from jaxspec.engine.assembly import page_layouts, placements
from jaxspec.engine.engine import Engine
from jaxspec.hardware.platforms import facts
from jaxspec.loading.draft_degree import draft_degree
from jaxspec.loading.drafts import check_same_tokenizer, load_draft
from jaxspec.loading.quantised import bytes_per_device, check_has_head, form_of, quantiser
from jaxspec.loading.resolved import resolved, resolved_draft
from jaxspec.loading.weights import compute_dtype
from jaxspec.loading.weights import load as load_model
from jaxspec.models.backend import Backend
from jaxspec.models.decoder import abstract_params, random_params
from jaxspec.models.model import Model
from jaxspec.models.sharding import for_degree
from jaxspec.options.engine import EngineConfig
from jaxspec.options.speculative import SpeculativeConfig
from jaxspec.parallel.placement import Placement, make_placement
from jaxspec.runtime.compilation_cache import enable_compilation_cache
from jaxspec.runtime.programs import Programs
from pallas_kernels.device import Device, here


@dataclasses.dataclass
class Setup:
    """The loaded models of a bench.

    device, dtype: the accelerator and the compute dtype.
    placement: devices and sharding of the target. placement.draft holds the draft's.
    draft: a draft model or a head, None for n-gram drafting.
    tokenizer: tokenizer of a real model, None for random weights.
    programs: compiled programs, shared by all engines, with the seconds spent on compiling.
    """

    options: BenchOptions
    device: Device
    dtype: Any
    placement: Any
    target: Model
    draft: Model | None
    tokenizer: Any
    programs: Programs

    def engine(self, rows: int, max_len: int, speculative: SpeculativeConfig | None, **options: Any) -> Engine:
        """Return an engine for at most `rows` requests of max_len tokens each. All engines share the weights.

        speculative: config of the drafts, None for plain decoding. options: other fields of EngineConfig.
        """
        drafts = speculative.num_speculative_tokens if speculative else 0
        models = {"target": self.target}
        if self.draft and speculative:
            models["draft"] = self.draft
        page_size = facts(self.device.platform).page_size
        num_pages = rows * (math.ceil((max_len + drafts) / page_size) + 1)
        config = EngineConfig(
            max_model_len=max_len,
            max_num_seqs=rows,
            page_size=page_size,
            num_pages=num_pages,
            kernels=self.options.kernels,
            kv_cache_dtype=self.options.kv_cache_dtype,
            **options,
        )
        self.check_memory(models, config, speculative, max_len)
        return Engine(
            self.target,
            config,
            placement=self.placement,
            speculative=speculative,
            draft=models.get("draft"),
            device=self.device,
            programs=self.programs,
        )

    def check_memory(
        self, models: dict[str, Model], config: EngineConfig, speculative: SpeculativeConfig | None, max_len: int
    ) -> None:
        """Raise UserError if the page pools of these models do not fit into the free memory of the device."""
        stats = memory(self.placement.first_device)
        if stats is None:
            return
        places, platform = placements(models, self.placement), self.device.platform
        layouts = page_layouts(models, config, speculative, places, platform, max_len)
        pool = sum(layout.pool_bytes(places[name].degree, platform) for name, layout in layouts.items())
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        if pool > free:
            raise UserError(
                f"the cache needs {pool / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: lower --batch-size or --context"
            )

    def prompts(self, rows: int, context: int) -> list[list[int]]:
        """Return prompts of `context` tokens, one per row: random ids, or English text for a real model.

        The prompts differ, so that no two rows share pages.
        """
        if self.tokenizer is None:
            vocab = min(m.config.vocab_size for m in (self.target, self.draft) if m)
            return [np.random.default_rng(row).integers(0, vocab, context).tolist() for row in range(rows)]
        ids = self.tokenizer.encode(english())
        shift = max(1, min(context, (len(ids) - context) // max(rows - 1, 1)))
        if len(ids) < context + shift * (rows - 1):
            raise UserError(
                f"--context {context} with --batch-size {rows} needs more text than the {len(ids)} tokens of the "
                "built-in prompt: lower one of them"
            )
        return [ids[shift * row : shift * row + context] for row in range(rows)]


def english() -> str:
    """Return a long English text that comes with Python: the topics of its interactive help, the longest first."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics, key=lambda name: -len(topics[name])))


def load(options: BenchOptions) -> Setup:
    """Load a real model and draft, or make a preset's random weights on the device.

    The weights have the compute dtype, or, for a preset, the quantised form that the options name.
    """
    enable_compilation_cache()
    device = here()
    dtype = compute_dtype(options.dtype, device)
    placement = placed(options, device)
    names = (options.model or presets.split(options.preset or "")[0], options.draft_name)
    placements = (placement, placement.draft)
    models: list[Model | None] = [None, None]
    tokenizer: Any = None
    for i, name in enumerate(names):
        if name is not None and options.preset is not None:
            beside = models[0].config if models[0] else None
            config = for_degree(presets.preset(name, beside), placements[i].degree)
            form = (options.quantization, options.draft_quantization)[i]
            check_has_head(name, config, form)
            check_weights_fit(name, config, dtype, placements[i], form)
            models[i] = Model(config, random_params(config, dtype, placements[i], i, keep=published_in(form)))
    if options.model is not None:
        models, tokenizer = real(options, dtype, placement)
        for name, model in zip(names, models, strict=True):
            if name and model:
                options.check_context(name, model.config)
    target, draft = models
    assert target is not None
    target = target.stored_for(Backend(device, placement, options.kernels))
    draft = draft and draft.stored_for(Backend(device, placement.draft, options.kernels))
    return Setup(options, device, dtype, placement, target, draft, tokenizer, Programs(placement))


def as_published(x: Any) -> Any:
    """Return the values x rounded to bfloat16, the dtype of the public checkpoints, in their own dtype."""
    return x.astype(jnp.bfloat16).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def published_in(form: str | None) -> Keep:
    """Return the function `keep` of `random_params` that rounds a parameter as published, and quantises it to a form.

    form: name of the form, as in `jaxspec.loading.quantised.quantiser`, or None.
    """
    quantise = quantiser(form)
    return lambda name, parameter, x: quantise(name, parameter, as_published(x))


def placed(options: BenchOptions, device: Device) -> Placement:
    """Return the placement (devices and sharding) of the target, which contains the draft's placement too."""
    size = options.tensor_parallel_size
    draft_size = options.draft_tensor_parallel_size
    if draft_size is None and size > 1 and options.draft_name:
        dtype = compute_dtype(options.dtype, device)
        if options.preset is not None:
            config = presets.preset(options.draft_name, presets.preset(presets.split(options.preset)[0]))
        else:
            target = resolved(checkpoints.resolve(options.model or ""))
            config = resolved_draft(checkpoints.resolve(options.draft_name), target).config
        draft_size = draft_degree(config, size, dtype, device)
    return make_placement(size, draft_size=draft_size)


def check_weights_fit(name: str, config: Any, dtype: Any, placement: Any, form: str | None) -> None:
    """Raise UserError if a preset's weights do not fit into the free memory of the first device.

    The matrix that is being quantised is there in the compute dtype, too.

    form: name of the quantised form of the weights, or None.
    """
    stats = memory(placement.first_device)
    if stats is None:
        return
    known = abstract_params(config, dtype, placement)
    need = sum(bytes_per_device(form, where, p) for where, p in known.items())
    if form is not None:
        need += max(bytes_per_device(None, where, p) for where, p in known.items() if form_of(form, where, p))
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    if need > free:
        raise UserError(f"{name} needs {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free: choose a smaller preset")


def real(options: BenchOptions, dtype: Any, placement: Placement) -> tuple[list[Model | None], Any]:
    """Load a real model and its draft as LLM does. Return [target, draft or None] and the model's tokenizer."""
    found = resolved(checkpoints.resolve(options.model or ""))
    draft = options.draft
    tokenizer = checkpoints.load_tokenizer(found.source)
    target = load_model(found, dtype, placement, quantization=options.quantization)
    models: list[Model | None] = [target, None]
    if draft is not None:
        draft_source = checkpoints.resolve(draft)
        check_same_tokenizer(found.source, tokenizer, draft_source)
        form = options.draft_quantization
        models[1] = load_draft(resolved_draft(draft_source, found), dtype, placement.draft, target, quantization=form)
    return models, tokenizer
