"""Tiny models whose text does not get stuck, drafts of every quality for them, and engines that are compiled once.

With plain random weights and a tied head the next token is mostly the last one again, and a wrong cache would show
nowhere. So here attention and the MLPs are made to outweigh the embedding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.models.model import Model
from jaxspec.options.sampling_params import SamplingParams
from tests.support import tiny_models

GAINS = {"embed": 0.2, "qkv": 4.0, "q": 4.0, "q_norm": 3.0, "out": 3.0, "down": 3.0}
GAINS |= {"post_attention_norm": 8.0, "post_mlp_norm": 8.0}
VOCAB = tiny_models.BASE.vocab_size
OPTIONS = {"max_model_len": 64, "num_pages": 48, "max_num_seqs": 8, "prefill_chunk": 128}


def repeating(length: int, period: int, seed: int) -> tuple[int, ...]:
    """A prompt in which every n-gram occurred before."""
    return tuple(int(i) for i in np.resize(np.random.default_rng(seed).integers(0, VOCAB, period), length))


# One token, a few, more than one page, more than one prefill chunk; lengths that are and are not multiples of a page.
PROMPTS = ((9,), (5, 8), repeating(7, 3, 1), repeating(16, 5, 2), repeating(33, 7, 3))
MAX_TOKENS = (17, 11, 1, 24, 19)


@functools.cache
def target(family: str = "llama", tensor_parallel_size: int = 1) -> Model:
    """One of tiny_models.FAMILIES; or "loops", whose text soon repeats, for prompt lookup to be right."""
    m = tiny_models.model(tiny_models.FAMILIES["llama3" if family == "loops" else family], 0, tensor_parallel_size)
    return m if family == "loops" else lively(m)


def lively(m: Model) -> Model:
    return Model(m.config, {name: w * GAINS.get(name.split(".")[-1], 1.0) for name, w in m.params.items()})


def first_layer(m: Model) -> Model:
    """Right now and then."""
    c = m.config
    params = {name: w for name, w in m.params.items() if not name.startswith("layers.") or name[7] == "0"}
    if width := c.layer_embed_width:
        params |= {name: params[name][:, :width] for name in ("layer_embed", "layer_embed_in")}
    return Model(dataclasses.replace(c, num_layers=1, windows=c.windows[:1], per_layer=c.per_layer[:1]), params)


def noisy(m: Model, amount: float = 0.07) -> Model:
    """The target with noise on its weights: right more often than not."""
    keys = jax.random.split(jax.random.key(7), len(m.params))
    shaken = lambda w, key: w + amount * jnp.std(w) * jax.random.normal(key, w.shape, w.dtype)
    params = {name: shaken(w, key) for (name, w), key in zip(m.params.items(), keys, strict=True)}
    return Model(m.config, {name: jax.device_put(w, m.params[name].sharding) for name, w in params.items()})


def wrong(m: Model) -> Model:
    """The target with its logits negated: its likeliest token is the target's unlikeliest."""
    head = m.params["embed"].T if m.config.tied else m.params["head"]
    return Model(dataclasses.replace(m.config, tied=False), {**m.params, "head": -head})


def vocabulary(m: Model, size: int) -> Model:
    """The target with another padding of its vocabulary: rows cut off, or rows added that win every argmax."""
    assert m.config.tied
    embed = m.params["embed"]
    extra = 100.0 * jax.random.normal(jax.random.key(5), (max(size - VOCAB, 0), embed.shape[1]))
    params = {**m.params, "embed": jnp.concatenate([embed, extra])[:size]}
    return Model(dataclasses.replace(m.config, vocab_size=size), params)


def reduced(m: Model) -> Model:
    """The target, which never says every fourth of its ids; half of the others have logits by way of a second product,
    and ids are read in a table of twice the width."""
    own = [i for i in range(m.config.vocab_size) if i % 4]
    d2t, size, width = jnp.array(own, jnp.int32), len(own), m.config.width
    t2d = jnp.full(m.config.vocab_size, size, jnp.int32).at[d2t].set(jnp.arange(size))
    head = (m.params["embed"].T if m.config.tied else m.params["head"])[:, d2t]
    turn = jnp.linalg.qr(jax.random.normal(jax.random.key(6), (2 * width, width)))[0]
    own_params = {
        "embed": m.params["embed"] @ turn.T,
        "embed_in": turn,
        "head": head[:, : size // 2],
        "rare_in": turn[:width],
        "rare_head": jnp.linalg.inv(turn[:width]) @ head[:, size // 2 :],
    }
    placed = jax.device_put(own_params | {"d2t": d2t, "t2d": t2d}, m.params["norm"].sharding)
    shape = {"reduced_vocab_size": size, "rare_vocab_size": size - size // 2, "rare_width": width}
    config = dataclasses.replace(m.config, **shape, embed_width=2 * width, tied=False)
    return Model(config, {**m.params, **placed})


DRAFTS = {
    "itself": lambda m: m,
    "first_layer": first_layer,
    "noisy": noisy,
    "wrong": wrong,
    "random": lambda m: tiny_models.model(tiny_models.small(m.config), 5),
    "fewer_ids": functools.partial(vocabulary, size=VOCAB - 8),
    "more_ids": functools.partial(vocabulary, size=VOCAB + 8),
    "reduced": reduced,
}

# A drafter's name -> the family on which it is sometimes right and sometimes wrong.
FAMILY = {"ngram": "loops", "combined": "loops", **dict.fromkeys(DRAFTS, "llama")}


def speculation(method: str, k: int, /, **options) -> tuple[dict | None, bool]:
    """(speculative_config, whether a draft model is needed); method: "plain", "ngram", "combined" (n-gram
    and the noisy draft) or a name in DRAFTS."""
    if method == "plain":
        return None, False
    if method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_min": 1, **options}, False
    if method == "combined":
        options = {"method": "ngram+draft_model", "prompt_lookup_min": 3, **options}
    return {"model": method, "num_speculative_tokens": k, **options}, True


def new_engine(method: str = "plain", k: int = 0, family: str = "llama", *, spec: dict | None = None, **options):
    """An engine of its own; options override OPTIONS, spec adds to the speculative_config."""
    degree = options.get("tensor_parallel_size", 1)
    config, has_draft = speculation(method, k, **(spec or {}))
    draft = DRAFTS["noisy" if method == "combined" else method](target(family, degree)) if has_draft else None
    return tiny_models.engine(target(family, degree), config, draft, **OPTIONS | options)


@functools.cache
def engine(method: str = "plain", k: int = 0, family: str = "llama") -> Engine:
    """The same, shared by all tests of a process: its programs are compiled once."""
    return new_engine(method, k, family)


def params(max_tokens: int | Sequence[int] = MAX_TOKENS, **options) -> list[SamplingParams]:
    """Greedy unless told otherwise; one a prompt where max_tokens is a list."""
    listed = [max_tokens] if isinstance(max_tokens, int) else max_tokens
    options = options if "temperature" in options else options | {"temperature": 0.0}
    return [SamplingParams(max_tokens=n, **options) for n in listed]


def serve(
    engine: Engine,
    prompts,
    sampling: Sequence[SamplingParams],
    *,
    rounds: int | None = None,
    stop_ids=(),
    bad_words=None,
    automata=None,
):
    """All prompts together, rounds a launch; the requests. bad_words, automata: of each. Every page must come back."""
    nothing = [()] * len(prompts), [None] * len(prompts)
    rows = zip(prompts, sampling, bad_words or nothing[0], automata or nothing[1], strict=True)
    requests = [engine.add(p, s, stop_ids=stop_ids, bad_words=words, automaton=a) for p, s, words, a in rows]
    while engine.busy:
        engine.step(rounds)
    assert engine.scheduler.allocator.num_free == engine.num_pages
    assert not any(table.users for table in engine.scheduler.grammars.resident.values())
    return requests


def texts(requests: Sequence[Request]) -> list[list[int]]:
    return [r.output for r in requests]


@functools.cache
def plain(prompts: tuple, sampling: tuple, family: str = "llama", stop_ids: tuple = ()) -> list[list[int]]:
    """What plain decoding gives. A batch of one row is padded by a second: products of one row round differently."""
    pad = len(prompts) == 1
    prompts, sampling = prompts + prompts[:1] * pad, sampling + sampling[:1] * pad
    found = texts(serve(engine(family=family), prompts, sampling, stop_ids=stop_ids))
    return found[:1] if pad else found


def total(requests: Sequence[Request]) -> list[int]:
    """Accepted drafts by position in the round, summed over requests."""
    return [sum(column) for column in zip(*(r.metrics.num_accepted_tokens_per_pos for r in requests), strict=True)]
