"""Many rows of one prompt through the device program: the whole program as a sampler whose law is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.pages import PagedKVCache, allocate, cache_layout
from jaxspec.decode.packing import Packed, pack
from jaxspec.decode.prefill import Chunk
from jaxspec.decode.programs import lower
from jaxspec.decode.state import STOP, DecodeConfig, LaunchInput, LaunchResult, RowLimits, Variant
from jaxspec.drafters.combined import Combined
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.ngram import NGram
from jaxspec.engine.engine import Model
from jaxspec.engine.runner import fetch
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers import Backend
from jaxspec.models.paged import PagedModel
from jaxspec.parallel.mesh import make_mesh, sharding
from jaxspec.sampling.distribution import SamplingRows
from jaxspec.sampling.processors import Processors
from pallas_kernels.device import here
from tests import tiny

PLATFORM = jax.default_backend()
# Some of these programs run for seconds: on CPU, undo what conftest.py asks for in favour of compile time.
CPU_OPTIONS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
QUICK = CPU_OPTIONS if PLATFORM == "cpu" else None
PAGE_SIZE = 8
PROMPT = (0, 2, 1)
WORDS = (4, 3)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a group of rows samples. num_drafts None: the program's K; bad_words: at most WORDS[0] of WORDS[1] ids."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    coupled: bool = False
    num_drafts: int | None = None
    allowed_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    @property
    def processed(self) -> bool:
        penalties = (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)
        return penalties or self.allowed_ids is not None or bool(self.bad_words or self.min_tokens or self.bias)


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
    return tiny.model(config(vocab_size), seed)


def blend(a: Model, b: Model, share: float) -> Model:
    """Weights on the way from a to b: a draft that is like its target, but not too much."""
    mix = lambda x, y: (1 - share) * x + share * y
    return Model(a.config, {name: mix(x, b.params[name]) for name, x in a.params.items()})


def padded(values: Sequence, width: int) -> list:
    return [*values, *[-1] * (width - len(values))]


def paged(model: Model, num_pages: int) -> PagedModel:
    layout = cache_layout(model.config, page_size=PAGE_SIZE, num_pages=num_pages, dtype=jnp.float32, platform=PLATFORM)
    return PagedModel(model.config, layout, model.config.max_model_len, Backend(here(), make_mesh()))


class Launches:
    """A compiled program for a batch of rows that share a prompt. Compiled when made: patch what it calls before.

    draft: a Model, an NGram's (lookup_min, lookup_max), both for Combined, or None for plain decoding.
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
        prompt: Sequence[int] = PROMPT,
        compiler_options: dict | None = QUICK,
    ) -> None:
        self.settings, self.length, self.num_drafts, self.prompt = tuple(settings), length, num_drafts, tuple(prompt)
        self.rows_each, self.rows = rows_each, rows_each * len(settings)
        self.row_pages = -(-(len(prompt) + length + num_drafts) // PAGE_SIZE)
        num_pages, mesh = self.rows * self.row_pages, make_mesh()
        self.params: dict[str, Any] = {"target": target.params}
        drafter: Any = None
        lookup, draft = draft if isinstance(draft, tuple) and isinstance(draft[1], Model) else (None, draft)
        if isinstance(draft, Model):
            drafter = DraftModel(num_drafts, paged(draft, num_pages))
            self.params["draft"] = draft.params
        elif draft is not None:
            drafter = NGram(num_drafts, *draft)
        if lookup:
            drafter = Combined(NGram(num_drafts, *lookup), drafter)
        variant = Variant(
            standard=any(s.temperature and not s.coupled for s in settings),
            coupled=any(s.temperature and s.coupled for s in settings),
            filters=any(s.top_k or s.top_p < 1 or s.min_p for s in settings),
            processors=any(s.processed for s in settings),
        )
        self.config = DecodeConfig(paged(target, num_pages), drafter, variant, greedy_draft)
        layouts = [self.config.target.layout, *([paged(draft, num_pages).layout] if isinstance(draft, Model) else [])]
        self.cache = PagedKVCache(*(allocate(layout, mesh) for layout in layouts))
        self.place = lambda tree: jax.device_put(tree, sharding(mesh))
        self.block_table = np.arange(num_pages, dtype=np.int32).reshape(self.rows, self.row_pages)
        self.cache = self.prefill()
        arguments = self.arguments(np.zeros(self.rows_each, np.int64), self.settings)
        lowered = lower("launch", self.config, self.params, self.cache, arguments)
        self.program = lowered.compile(compiler_options=compiler_options)

    def prefill(self) -> PagedKVCache:
        rows = self.rows
        chunk = Chunk(
            tokens=np.tile(np.array(self.prompt[:-1], np.int32), (rows, 1)),
            start=np.zeros(rows, np.int32),
            length=np.full(rows, len(self.prompt) - 1, np.int32),
            block_table=self.block_table,
        )
        packed = self.place(pack((chunk,)))
        program = lower("prefill", self.config, self.params, self.cache, packed).compile()
        return program(self.params, self.cache, packed)[0]

    def batch(self, seeds: np.ndarray, settings: Sequence[Setting]) -> LaunchInput:
        """Rows by setting: rows_each of the first, then of the second...; every setting sees the same seeds."""
        rows, start = self.rows, len(self.prompt)
        column = self.column
        tokens = np.zeros((rows, self.row_pages * PAGE_SIZE + 1), np.int32)
        tokens[:, :start] = self.prompt
        words = np.stack([seeds >> 32, seeds & 0xFFFFFFFF], axis=1).astype(np.uint32)
        drafts = (self.num_drafts if s.num_drafts is None else s.num_drafts for s in settings)
        return LaunchInput(
            tokens=tokens,
            num_tokens=np.full(rows, start, np.int32),
            draft_len=np.full(rows, start - 1, np.int32),
            live=np.ones(rows, bool),
            block_table=self.block_table,
            sampling=SamplingRows(
                temperature=column((s.temperature for s in settings), np.float32),
                top_k=column((s.top_k for s in settings), np.int32),
                top_p=column((s.top_p for s in settings), np.float32),
                min_p=column((s.min_p for s in settings), np.float32),
                seed=np.tile(words, (len(settings), 1)),
                coupled=column((s.coupled for s in settings), bool),
            ),
            limits=RowLimits(
                num_speculative_tokens=column(drafts, np.int32),
                max_len=np.full(rows, start + self.length, np.int32),
                stop_ids=column((padded(s.stop_ids, 4) for s in settings), np.int32),
            ),
            processors=self.processors(settings) if self.config.variant.processors else None,
        )

    def processors(self, settings: Sequence[Setting]) -> Processors:
        size, column = self.config.target.config.vocab_size, self.column
        words = np.full((len(settings), *WORDS), -1, np.int32)
        for row, setting in enumerate(settings):
            for i, word in enumerate(setting.bad_words):
                words[row, i, WORDS[1] - len(word) :] = word
        return Processors(
            prompt_len=np.full(self.rows, len(self.prompt), np.int32),
            min_len=column((len(self.prompt) + s.min_tokens for s in settings), np.int32),
            restricted=column((s.allowed_ids is not None for s in settings), bool),
            allowed_ids=column((padded(s.allowed_ids or (), size) for s in settings), np.int32),
            bias_ids=column((padded([i for i, _ in s.bias], size) for s in settings), np.int32),
            bias=column((padded([value for _, value in s.bias], size) for s in settings), np.float32),
            bad_words=column(words, np.int32),
            repetition=column((s.repetition for s in settings), np.float32),
            presence=column((s.presence for s in settings), np.float32),
            frequency=column((s.frequency for s in settings), np.float32),
        )

    def column(self, values: Iterable, dtype: type) -> np.ndarray:
        """One value a setting -> one a row."""
        return np.repeat(np.array(list(values), dtype), self.rows_each, axis=0)

    def arguments(self, seeds: np.ndarray, settings: Sequence[Setting]) -> Packed:
        return self.place(pack((self.batch(seeds, settings), np.int32(32), np.bool_(False), np.float32(0))))

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
