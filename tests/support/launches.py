"""Many rows of one prompt through the device program: the whole program as a sampler whose law is known."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import PagedKVCache, allocate
from jaxspec.decode.state import STOP, DecodeConfig, LaunchInput, LaunchResult
from jaxspec.drafters.combined import Combined
from jaxspec.drafters.draft_model import DraftModel, DraftModelTree
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.trees.growth import Shape, Tree
from jaxspec.engine import batch
from jaxspec.engine.request import Request
from jaxspec.engine.runner import fetch
from jaxspec.grammars.automaton import Automaton
from jaxspec.models.backend import Backend
from jaxspec.models.config import ModelConfig
from jaxspec.models.model import Model
from jaxspec.models.paged import PagedModel, cache_layout
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.parallel.placement import make_placement
from jaxspec.runtime.packing import Packed, pack
from jaxspec.runtime.programs import lower
from jaxspec.sampling import rng
from jaxspec.sampling.processors.grammar import BLOCK, blocks, num_blocks
from jaxspec.verify import rules
from pallas_kernels.device import here
from tests.support import tiny_models

PLATFORM = jax.default_backend()
# Some of these programs run for seconds: on CPU, undo what conftest.py asks for in favour of compile time.
CPU_OPTIONS = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}
QUICK = CPU_OPTIONS if PLATFORM == "cpu" else None
PAGE_SIZE = 8
PROMPT = (0, 2, 1)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a group of rows samples.

    num_drafts: None for the program's K.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    rule: str = "standard"
    num_drafts: int | None = None
    allowed_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    automaton: Automaton | None = None

    def params(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition,
            presence_penalty=self.presence,
            frequency_penalty=self.frequency,
            logit_bias=dict(self.bias),
            allowed_token_ids=self.allowed_ids,
        )


def config(vocab_size: int, width: int = 16) -> ModelConfig:
    """One layer, a head of its own: with a tied one the next token is mostly the last again."""
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        num_layers=1,
        width=width,
        mlp_width=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_model_len=256,
        windows=(None,),
        tied=False,
    )


def model(vocab_size: int, seed: int) -> Model:
    """Random weights; the logits have a standard deviation of about 1."""
    return tiny_models.model(config(vocab_size), seed)


def blend(a: Model, b: Model, share: float) -> Model:
    """Weights on the way from a to b: a draft that is like its target, but not too much."""
    mix = lambda x, y: (1 - share) * x + share * y
    return Model(a.config, {name: mix(x, b.params[name]) for name, x in a.params.items()})


def paged(model: Model, num_pages: int) -> PagedModel:
    layout = cache_layout(model.config, page_size=PAGE_SIZE, num_pages=num_pages, dtype=jnp.float32, platform=PLATFORM)
    return PagedModel(model.config, layout, model.config.max_model_len, Backend(here(), make_placement()))


def places(automata: Iterable[Automaton]) -> dict[Automaton | None, int]:
    """Where each automaton's table begins in the pool."""
    found, words = {}, 0
    for automaton in dict.fromkeys(automata):
        found[automaton] = words
        words += num_blocks(automaton) * BLOCK
    return found


def written(places: dict[Automaton | None, int]) -> np.ndarray:
    """The pool with these tables."""
    return np.concatenate([blocks(automaton).view(np.uint16).reshape(-1) for automaton in places])


class Launches:
    """A compiled program for a batch of rows that share a prompt. Compiled when made: patch what it calls before.

    draft: a Model, an NGram's (lookup_min, lookup_max), both for Combined, or None for plain decoding. tree: the shape
    of what a Model proposes, not a chain.
    """

    def __init__(
        self,
        target: Model,
        draft: Model | tuple[int, int] | tuple[tuple[int, int], Model] | None,
        num_drafts: int,
        settings: Sequence[Setting],
        *,
        length: int,
        rows_each: int,
        greedy_draft: bool = False,
        tree: Shape | None = None,
        prompt: Sequence[int] = PROMPT,
        compiler_options: dict | None = QUICK,
    ) -> None:
        self.settings, self.length, self.num_drafts, self.prompt = tuple(settings), length, num_drafts, tuple(prompt)
        self.rows_each, self.rows = rows_each, rows_each * len(settings)
        self.row_pages = -(-(len(prompt) + length + num_drafts) // PAGE_SIZE)
        num_pages, mesh = self.rows * self.row_pages, make_placement()
        self.params: dict[str, Any] = {"target": target.params}
        drafter: Any = None
        lookup, draft = draft if isinstance(draft, tuple) and isinstance(draft[1], Model) else (None, draft)
        if isinstance(draft, Model):
            drafter = DraftModel(num_drafts, paged(draft, num_pages))
            if tree:
                deep = DraftModelTree(tree.depth, drafter.model, max_lag=tree.depth)
                drafter = Tree(num_drafts, deep, tree)
            self.params["draft"] = draft.params
        elif draft is not None:
            drafter = NGram(num_drafts, *draft)
        if lookup:
            drafter = Combined(num_drafts, NGram(num_drafts, *lookup), drafter)
        self.places = places(s.automaton for s in self.settings if s.automaton)
        self.inputs = functools.cache(self.make_inputs)  # there are many rows; between launches only seeds differ
        requests = self.make_requests(self.settings)
        variant = batch.variant(requests)
        self.config = DecodeConfig(paged(target, num_pages), drafter, variant, greedy_draft)
        self.layout = self.config.target.layout
        layouts = [self.layout, *([paged(draft, num_pages).layout] if isinstance(draft, Model) else [])]
        self.cache = PagedKVCache(*(allocate(layout, mesh) for layout in layouts))
        self.place = lambda tree: jax.device_put(tree, mesh.sharding())
        self.cache = self.prefill(requests)
        if variant.grammars:
            self.params["grammars"] = self.place(written(self.places))
        arguments = self.arguments(np.zeros(rows_each, int), self.settings)
        lowered = lower("launch", self.config, self.params, self.cache, arguments)
        self.program = lowered.compile(compiler_options=compiler_options)

    def prefill(self, requests: list[Request]) -> PagedKVCache:
        shape = batch.ChunkShape(batch.power_of_two(self.rows), 16)
        rows = batch.pieces(requests, [0] * self.rows, shape)
        assert [piece.length for piece in rows] == [len(self.prompt) - 1] * self.rows
        chunk = batch.chunk_input(rows, self.layout, shape, row_pages=self.row_pages)
        packed = self.place(pack((chunk,)))
        cache = self.cache
        for name in ("prefill", "catch_up") if self.config.drafter else ("prefill",):
            cache, _ = lower(name, self.config, self.params, cache, packed).compile()(self.params, cache, packed)
        return cache

    def make_requests(self, settings: tuple[Setting, ...]) -> list[Request]:
        """Rows by setting: rows_each of the first, then of the second..."""
        known, at = len(self.prompt), range(0, self.rows * self.row_pages, self.row_pages)
        rows = [row for s in settings for row in [(s, s.params(self.length))] * self.rows_each]
        return [
            Request(
                id=row,
                prompt=list(self.prompt),
                params=params,
                seed=0,
                rule=rules.of_request(setting.rule, greedy=params.greedy, seeded=False),
                stop_ids=setting.stop_ids,
                max_len=known + self.length,
                num_speculative_tokens=self.num_drafts if setting.num_drafts is None else setting.num_drafts,
                bad_words=setting.bad_words,
                automaton=setting.automaton,
                grammar_at=self.places.get(setting.automaton),
                pages=list(range(first, first + self.row_pages)),
                target_len=known - 1,
                draft_len=known - 1,
            )
            for row, (first, (setting, params)) in enumerate(zip(at, rows, strict=True))
        ]

    def make_inputs(self, settings: tuple[Setting, ...]) -> LaunchInput:
        requests, shape, used = self.make_requests(settings), (self.rows, self.row_pages), self.config.variant
        return batch.launch_input(requests, self.num_drafts, used, self.layout, shape, num_rounds=32)

    def arguments(self, seeds: np.ndarray, settings: Sequence[Setting]) -> Packed:
        """Every setting sees the same seeds."""
        packed = pack((self.inputs(tuple(settings)),))
        words = [rng.seed_words(seed) for seed in seeds.tolist()]
        (inputs,) = packed.unpack()  # views of the packed words
        inputs.sampling.seed[:] = np.tile(np.array(words, np.uint32), (len(settings), 1))
        return self.place(packed)

    def run(self, seeds: np.ndarray, settings: Sequence[Setting] | None = None) -> LaunchResult:
        """One launch over rows_each seeds; other settings than those compiled for may ask for nothing new."""
        self.cache, result = self.program(self.params, self.cache, self.arguments(seeds, settings or self.settings))
        result = fetch(result)
        assert ((result.num_new == self.length) | (result.finish == STOP)).all()
        # Behind a stop id the text goes on with that id, for the law to be one of texts of one length.
        at = np.minimum(np.arange(result.new_tokens.shape[1]), result.num_new[:, None] - 1)
        return dataclasses.replace(result, new_tokens=np.take_along_axis(result.new_tokens, at, axis=1))

    def sample(self, samples: int) -> tuple[np.ndarray, np.ndarray]:
        """-> (tokens [settings, samples, length], drafts accepted per position and drafting round [settings, K])."""
        launches = -(-samples // self.rows_each)
        results = [self.run(np.arange(self.rows_each) + i * self.rows_each) for i in range(launches)]
        by_setting = lambda x: x.reshape(len(self.settings), self.rows_each, *x.shape[1:])
        tokens = np.concatenate([by_setting(r.new_tokens[:, : self.length]) for r in results], axis=1)
        position = np.arange(self.num_drafts)
        accepted = sum((by_setting(r.accepted)[..., None] > position).sum(axis=(1, 2)) for r in results)
        rounds = sum((by_setting(r.proposed) > 0).sum(axis=(1, 2)) for r in results)
        return tokens[:, :samples], accepted / np.maximum(rounds, 1)[:, None]
