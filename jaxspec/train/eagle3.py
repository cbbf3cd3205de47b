"""Training EAGLE-3's head: one layer over the next token and three of the target's hidden states, which learns to go on
from its own output, as it has to where it drafts ("training-time test").

Source: Li et al., https://arxiv.org/abs/2503.01840.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from checkpoints import heads
from jaxspec.drafters.eagle3 import Config, places
from jaxspec.engine.setup import Model
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import bind, parameters, random_params, ropes_of
from jaxspec.models.layers import Rows
from jaxspec.train import build
from jaxspec.train.options import TrainOptions
from pallas_kernels.plain import project, rms_norm

AHEAD, READS = 2, True  # an entry is of a position's features and the token after it
FADES = 0.8  # of each pass's share in the loss, to the next: a draft counts only where all before it were accepted
MOST_IDS = 32_000  # unless told otherwise
NOT_ITS_OWN = ("width", "rare_ids", "rare_width", "init_from")  # options that it has no use for
NAMES = places("midlayer.")  # as SafeAILab's files call them


def new(options: TrainOptions, target: Model, counts: np.ndarray, placement: Any) -> Model:
    """It proposes the most frequent ids. Raises UserError for an option that asks for another kind of head."""
    config = head_config(target.config, options)
    ids = build.vocabulary(counts, config)
    params = random_params(config, jnp.float32, placement, options.seed)
    place = lambda name, x: jax.device_put(jnp.asarray(x, params[name].dtype), params[name].sharding)
    params |= {name: place(name, x) for name, x in ids.items()}
    if options.init_from_target:  # its way from hidden states to ids is known
        rows = build.rows_of_ids(target)
        params["head"] = place("head", (rows[ids["d2t"]] if ids else rows).T)
        params["norm"] = place("norm", target.params["norm"])
    return Model(config, params)


def head_config(target: ModelConfig, options: TrainOptions) -> Config:
    o, c = options, target
    for name in NOT_ITS_OWN:
        if getattr(o, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} is of a draft model, --method eagle3 has none: leave it out")
    if o.layers not in (None, 1):
        raise UserError(f"--layers {o.layers}, but --method eagle3 has one: leave it out")
    if c.num_layers < 5:
        raise UserError(f"--method eagle3 reads three of the target's layers, and it has {c.num_layers}: use another")
    size = build.num_ids(c, o, MOST_IDS)
    heads_ = o.heads or c.num_heads
    return Config(
        family="llama",
        vocab_size=c.vocab_size,
        num_layers=1,
        width=c.width,
        mlp_width=o.mlp_width or c.mlp_width,
        num_heads=heads_,
        num_kv_heads=o.kv_heads or np.gcd(heads_, c.num_kv_heads).item(),
        head_dim=c.head_dim,
        max_model_len=c.max_model_len,
        windows=(None,),
        rope=dataclasses.replace(c.rope, factors=()),
        norm_eps=c.norm_eps,
        tied=False,
        bos_id=c.bos_id,
        eos_ids=c.eos_ids,
        reduced_vocab_size=size if size < c.vocab_size else None,
        taps=(2, c.num_layers // 2, c.num_layers - 3),
        target_width=c.width,
    )


def passes(configs, draft, target, tokens, backend, k):
    """The k passes that propose k drafts: the first over what the target has said; each one after it over what the one
    before made of the position before."""
    target_config, config = configs
    rows = Rows(jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape))
    decoder = bind(target_config, target)
    hidden, _, tapped = decoder(tokens, (None,) * target_config.num_layers, rows, backend, taps=config.taps)
    hidden, tapped = lax.stop_gradient((hidden, tapped))
    head: Any = bind(config, draft)
    dtype = head.fc[...].dtype
    feature = head.features(None, [x.astype(dtype) for x in tapped], backend)
    x = lax.stop_gradient(decoder.embedded(jnp.roll(tokens, -1, axis=1), backend)).astype(dtype)
    told = rms_norm(head.token_norm[...], x, config.norm_eps)
    seen: list[tuple[jax.Array, jax.Array]] = []  # keys and values of each pass
    said = []
    for _ in range(k):
        out, carried = one_pass(head, feature, told, seen, rows, backend)
        said.append(out)
        feature = jnp.concatenate([feature[:, :1], carried[:, :-1]], axis=1)
    return jnp.stack(said, axis=2), hidden


def shares(k: int) -> tuple[float, ...]:
    each = FADES ** np.arange(k)
    return tuple((each / each.sum()).tolist())


def one_pass(head, feature, told, seen, rows: Rows, backend):
    """Entries of feature [B,T,E] and the tokens' `told` [B,T,E] -> (what logits are made of, what the next pass takes
    for features); adds its keys and values to `seen`."""
    c, layer = head.config, head.layers[0]
    both = jnp.concatenate([told, rms_norm(head.hidden_norm[...], feature, c.norm_eps)], axis=-1)
    tables = ropes_of(c, rows, backend)[c.rope]
    query, key, value = project(both, layer.qkv[...], None, None, None, *tables, c.num_kv_heads, c.norm_eps)
    seen.append((key, value))
    mixed = attend(query, seen, c.query_scale)
    x, normed = layer.feed_forward(feature, mixed, backend, next_norm=head.norm[...])
    if normed is None:
        normed = rms_norm(head.norm[...], x, c.norm_eps)
    return normed, x


def attend(query, seen, scale: float):
    """query [B,T,H,D] of the last pass; seen: keys and values [B,T,G,D] of all passes -> [B,T,H*D].

    A draft's cache holds what the first pass made of all positions but the last ones: before the entry at t stands, at
    t - i, that of the pass i before. So of the first pass it sees positions up to t - lag, and one of each other.
    """
    (b, t, _, d), (key, value), lag = query.shape, seen[0], len(seen) - 1
    query = query.reshape(b, t, key.shape[2], -1, d)
    place = jnp.arange(t)
    scores = jnp.einsum("btgnd,bsgd->bgnts", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(place[None, :] <= place[:, None] - lag, scores, -jnp.inf)
    back = lambda x, by: jnp.roll(x, by, axis=1)  # what stands `by` before; the first have none
    later = [(back(k, lag - i), back(v, lag - i), lag - i) for i, (k, v) in enumerate(seen) if i]
    for own_key, _, by in later:
        one = jnp.einsum("btgnd,btgd->bgnt", query, own_key, preferred_element_type=jnp.float32)
        scores = jnp.concatenate([scores, jnp.where(place >= by, one, -jnp.inf)[..., None]], axis=-1)
    weights = jax.nn.softmax(scores * scale, axis=-1).astype(value.dtype)
    mixed = jnp.einsum("bgnts,bsgd->btgnd", weights[..., :t], value)
    for i, (_, own_value, _) in enumerate(later):
        mixed += jnp.einsum("bgnt,btgd->btgnd", weights[..., t + i], own_value)
    return mixed.reshape(b, t, -1)


def save(folder: Path, params: Any, config: Any, fingerprint: str) -> None:
    """A folder of config.json and tensors, as others' engines read it, too."""
    said = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.head_size,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
    }
    tensors = heads.tensors(parameters(config), params, NAMES)
    if "d2t" in params:  # as differences from the draft's own
        tensors["d2t"] = np.asarray(params["d2t"], np.int64) - np.arange(config.head_size)
    heads.save(folder, said, tensors, fingerprint)
