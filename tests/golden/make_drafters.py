"""Makes tests/golden/drafters again: what the packages in which drafters are published propose.

`python -m tests.golden.make_drafters [FAMILY ...]`, where torch 2.13, transformers 5.17, speculators 0.9.0 (with
loguru and pydantic, without its other requirements), eagle-llm 1.2.1 and dflash 0.1.0 are installed, and with
TORCHDYNAMO_DISABLE=1: speculators compiles its forward passes. Weights and features come from the seeds of CASES; a
file holds ids and logits, float32.
"""

from __future__ import annotations

import sys
import tempfile
import types
from pathlib import Path

import numpy as np

from tests.drafters.references import common, dflash, dspark, eagle, eagle3, mtp

FOLDER = Path(__file__).parent / "drafters"
SHAPE = common.Shape()
NUM_TOKENS, K = 9, 3
P_EAGLE = {"mask_token_id": 5, "speculators": True}
# Family -> case -> options of its write().
CASES: dict[str, dict[str, dict]] = {
    "eagle": {"plain": {}, "no_bias": {"bias": False}},
    "eagle3": {
        "plain": {},
        "norm_before_residual": {"norm_before_residual": True, "speculators": True},
        "norms": {"fc_norm": True, "norm_output": True, "speculators": True, "layer_ids": [1, 4, 6, 7]},
        "norm_before_fc": {"norm_before_fc": True, "rope_theta": False},
    },
    "peagle": {"plain": P_EAGLE, "norm_before_residual": P_EAGLE | {"norm_before_residual": True}},
    "mtp": {"deepseek": {"kind": "deepseek"}, "mimo": {"kind": "mimo"}, "qwen3_next": {"kind": "qwen3_next"}},
    "dflash": {"plain": {"block_size": K + 1}, "long_block": {"block_size": K + 4}},
    "dspark": {
        "vanilla": {"speculators": True, "block_size": K},
        "gated": {"speculators": True, "block_size": K, "kind": "gated"},
        "rnn": {"speculators": True, "block_size": K + 1, "kind": "rnn", "from_pending": False},
    },
}
WRITE = {
    "eagle": eagle.write,
    "eagle3": eagle3.write,
    "peagle": eagle3.write,
    "mtp": mtp.write,
    "dflash": dflash.write,
    "dspark": dspark.write,
}


def tensors_of(folder: Path) -> dict:
    import torch
    from safetensors.numpy import load_file

    (file,) = folder.glob("*.safetensors")
    return {name: torch.from_numpy(x) for name, x in load_file(file).items()}


def load(module, tensors: dict, missing: tuple[str, ...] = ()) -> None:
    absent, unexpected = module.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert set(absent) <= set(missing), absent
    module.eval()


def chain(step, tokens: list[int], features, hidden, own_ids=None):
    """As the references' chain, over torch's outputs."""
    run = lambda h, row: [x.numpy() for x in step(h, row)]
    return common.chain(run, hidden, tokens, K, own_ids)


def eagle_llm(folder: Path, tokens, features):
    """eagle-llm 1.2.1: cnets.Model under a plain namespace for its configuration."""
    import torch
    from eagle.model.cnets import Model

    said, tensors = common.read_folder(folder)[0], tensors_of(folder)
    config = types.SimpleNamespace(**said, pad_token_id=0, rope_scaling=None, pretraining_tp=1)
    model = Model(config, bias=said.get("bias", True))
    model.tree_mask = None
    load(model, {"embed_tokens.weight": torch.from_numpy(features.embed)} | tensors)
    head = torch.from_numpy(features.head)

    def step(hidden, row):
        carried = model(torch.from_numpy(hidden)[None], torch.tensor([row]))[0, -1]
        return head @ carried, carried

    return chain(step, tokens, features, features.hidden)


def without_services() -> None:
    """speculators 0.9.0 imports modules for its services, which are empty here."""

    class Anything(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets", "hs_connectors"):
        sys.modules.setdefault(name, Anything(name))


def speculators_model(folder: Path, features):
    """speculators 0.9.0's EAGLE-3 or P-EAGLE."""
    import torch

    without_services()
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.peagle.config import PEagleSpeculatorConfig
    from speculators.models.peagle.core import PEagleDraftModel
    from transformers import LlamaConfig

    said, tensors = common.read_folder(folder)[0], tensors_of(folder)
    layer = LlamaConfig(**said.get("transformer_layer_config", said))
    layer._attn_implementation = "eager"
    names = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "mask_token_id")
    switches = {name: said[name] for name in (*names, "eagle_aux_hidden_state_layer_ids") if name in said}
    parallel = "mask_hidden" in tensors
    config = (PEagleSpeculatorConfig if parallel else Eagle3SpeculatorConfig)(
        transformer_layer_config=layer, **switches
    )
    model = (PEagleDraftModel if parallel else Eagle3DraftModel)(config)
    tensors = {name.replace("midlayer.", "layers.0."): x for name, x in tensors.items()}
    tensors["embed_tokens.weight"] = torch.from_numpy(features.embed)
    load(model, tensors, ("verifier_norm.weight", "verifier_lm_head.weight"))
    caught: list = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: caught.append(out[0].numpy()))
    ids = said.get("eagle_aux_hidden_state_layer_ids") or eagle3.default_taps(SHAPE.layers)
    taps = torch.from_numpy(np.concatenate([features.taps[i] for i in ids], -1))
    return model, taps, caught, (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).numpy()


def speculators_eagle3(folder: Path, tokens, features):
    """Its own forward in training, where step s of the last real entry is draft s + 1, given the drafts before."""
    import torch

    model, taps, caught, own_ids = speculators_model(folder, features)
    padded = torch.cat([taps, torch.randn(K, taps.shape[1])])[None]  # behind the row: seen by no earlier entry
    drafts, last = [], len(tokens) - 2
    for i in range(K):
        row = torch.tensor([tokens[1:] + drafts + [0] * (K - i)])
        caught.clear()
        model(padded, row, torch.zeros_like(row), ttt_steps=i + 1)
        drafts.append(int(own_ids[caught[i][last].argmax()]))
    return np.array(drafts), np.array([x[last] for x in caught])


def speculators_peagle(folder: Path, tokens, features):
    """Its own forward in training, with every chain sampled whole."""
    import torch
    from speculators.models.peagle import core

    model, taps, caught, own_ids = speculators_model(folder, features)
    last = len(tokens) - 2
    anchors = torch.cat([torch.arange(last + 1), torch.full((K - 1,), last)])
    depth = torch.cat([torch.zeros(last + 1, dtype=torch.long), torch.arange(1, K)])
    core.generate_cod_sample_indices = lambda **_: (anchors, depth)
    padded = torch.cat([taps, torch.zeros(K, taps.shape[1])])[None]
    row = torch.tensor([tokens[1:] + [0] * K])
    core.compute_metrics = lambda **_: (None, None)
    model(padded, row, torch.zeros_like(row), verifier_last_hidden_states=torch.zeros(1, row.shape[1], SHAPE.width))
    logits = caught[0][last:]
    return own_ids[logits.argmax(-1)], logits


def transformers_mtp(folder: Path, tokens, features):
    """transformers 5.17's MtpLayer around a layer of the kind that the file holds."""
    import torch
    from transformers.modeling_layers import MtpLayer
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.qwen2 import modeling_qwen2 as qwen2
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    said, tensors = common.read_folder(folder)[0], tensors_of(folder)
    kind = {"deepseek_v3": "deepseek"}.get(said["model_type"], said["model_type"])
    of = mtp.names(kind, SHAPE.layers)
    config_of, layer_of, norm_of, rope_of = {
        "deepseek": (llama.LlamaConfig, llama.LlamaDecoderLayer, llama.LlamaRMSNorm, llama.LlamaRotaryEmbedding),
        "mimo": (qwen2.Qwen2Config, qwen2.Qwen2DecoderLayer, qwen2.Qwen2RMSNorm, qwen2.Qwen2RotaryEmbedding),
        "qwen3_next": (qwen3.Qwen3Config, qwen3.Qwen3DecoderLayer, qwen3.Qwen3RMSNorm, qwen3.Qwen3RotaryEmbedding),
    }[kind]
    config = config_of(**{name: x for name, x in said.items() if name != "model_type"})
    config._attn_implementation = "eager"
    config.mtp_hidden_states_first = of.hidden_first
    layer = MtpLayer(config, layer_of, norm_of, 0)
    short = {of.embed_norm: "enorm", of.hidden_norm: "hnorm", of.project: "eh_proj", of.last_norm: "post_norm"}
    if of.norm_plus_one:  # plain norms hold the whole factor
        tensors = {name: x + 1 if x.ndim == 1 else x for name, x in tensors.items()}
    found = {f"{name}.weight": tensors.pop(f"{theirs}.weight") for theirs, name in short.items()}
    load(layer, found | {f"mtp_block.{name.removeprefix(of.block)}": x for name, x in tensors.items()})
    embed, head, rope = torch.from_numpy(features.embed), torch.from_numpy(features.head), rope_of(config)

    def step(hidden, row):
        x, length = embed[row][None], len(row)
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        hidden = torch.from_numpy(hidden)[None]
        carried = layer(x, hidden, rope(x, positions), mask, positions, None)[0, -1]
        return head @ carried, carried

    return chain(step, tokens, features, features.hidden)


def z_lab_dflash(folder: Path, tokens, features):
    """dflash 0.1.0: DFlashDraftModel, one whole block behind the whole context, of which the first drafts are taken."""
    import torch
    from dflash.model import DFlashDraftModel, extract_context_feature
    from transformers import Qwen3Config

    said = common.read_folder(folder)[0]
    model = DFlashDraftModel(Qwen3Config(**said))
    load(model, tensors_of(folder))
    states = [torch.from_numpy(features.taps[i])[None] for i in range(SHAPE.layers + 1)]  # as transformers counts
    masks = model.block_size - 1
    block = torch.from_numpy(features.embed)[[tokens[-1], *[model.mask_token_id] * masks]][None]
    out = model(
        position_ids=torch.arange(len(tokens) + masks)[None],
        noise_embedding=block,
        target_hidden=extract_context_feature(states, model.target_layer_ids),
    )
    logits = (out[0, 1 : 1 + K] @ torch.from_numpy(features.head).T).numpy()
    return logits.argmax(-1), logits


def speculators_dspark(folder: Path, tokens, features):
    """Its own forward in training: one block at the pending token, given the drafts before."""
    import torch

    without_services()
    from speculators.models.dflash import core as backbone
    from speculators.models.dspark import core
    from speculators.models.dspark.config import DSparkSpeculatorConfig
    from transformers import Qwen3Config

    said, tensors = common.read_folder(folder)[0], tensors_of(folder)
    layer = Qwen3Config(**said["transformer_layer_config"])
    layer._attn_implementation = "eager"
    names = ("draft_vocab_size", "block_size", "aux_hidden_state_layer_ids", "mask_token_id", "sample_from_anchor")
    switches = {name: said[name] for name in (*names, "markov_rank", "markov_head_type")}
    model = core.DSparkDraftModel(DSparkSpeculatorConfig(transformer_layer_config=layer, **switches))
    load(
        model,
        {name: x.float() if x.is_floating_point() else x for name, x in tensors.items()}
        | {"embed_tokens.weight": torch.from_numpy(features.embed)},
        ("verifier_norm.weight", "verifier_lm_head.weight"),
    )
    block, last = said["block_size"], len(tokens) - 1
    backbone.select_anchors = lambda *_: (torch.tensor([last]), torch.tensor([True]))
    caught: list = []
    core.compute_metrics = lambda logits, *_, **__: (caught.append(logits[0].numpy()), (None, None))[1]
    known = np.concatenate([features.taps[i] for i in said["aux_hidden_state_layer_ids"]], -1)
    taps = torch.cat([torch.from_numpy(known), torch.randn(block + 1, known.shape[1])])[None]  # unseen, behind the row
    own_ids, drafts = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).numpy(), []
    for i in range(K):
        row = torch.tensor([tokens + drafts + [0] * (block - i)])
        none = torch.zeros_like(row)
        model(taps, row, none, torch.zeros(1, row.shape[1], SHAPE.width), none, max_anchors=1)
        logits = caught[-1][block - K :]
        drafts.append(int(own_ids[logits[i].argmax()]))
    return np.array(drafts), logits


UPSTREAM = {
    "eagle": eagle_llm,
    "eagle3": speculators_eagle3,
    "peagle": speculators_peagle,
    "mtp": transformers_mtp,
    "dflash": z_lab_dflash,
    "dspark": speculators_dspark,
}


def inputs(family: str, case: str, folder: Path):
    """The case's folder, written; its row of tokens and the target's features."""
    seed = list(CASES[family]).index(case)
    WRITE[family](folder, seed=seed, target=SHAPE, **CASES[family][case])
    return common.random_features(SHAPE, NUM_TOKENS, 100 + seed)


def main(families: list[str]) -> None:
    import torch

    FOLDER.mkdir(exist_ok=True)
    for family in families or UPSTREAM:
        found = {}
        for case in CASES[family]:
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                ids, logits = UPSTREAM[family](Path(folder), *inputs(family, case, Path(folder)))
            found |= {f"{case}.ids": ids.astype(np.int32), f"{case}.logits": logits.astype(np.float32)}
            print(family, case, ids, "logits of size", float(np.abs(logits).mean()))
        np.savez(FOLDER / f"{family}.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1:])
