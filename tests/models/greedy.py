"""Greedy tokens of this library beside those of transformers, for the same weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

import checkpoints
from jaxspec.models.decoder import abstract_params
from jaxspec.models.model import Model
from jaxspec.models.sharding import for_degree
from jaxspec.parallel.placement import make_placement
from tests.golden.families import SHARED, save_model
from tests.support import tiny_models
from tests.support.lively_models import params

NEW = 200


def greedy_tokens(name: str, model, devices: int, folder: Path) -> tuple[list[int], list[int]]:
    """Return (ours, theirs), NEW tokens after the same prompt. Ours are speculated by n-grams over some devices.

    name: the model's name in `tests.golden.families`. folder: where the model is written.
    """
    import torch

    save_model(model, name, folder)
    source = checkpoints.resolve(str(folder))
    config = for_degree(checkpoints.load_config(source), devices)
    weights = checkpoints.load_params(source, config, abstract_params(config, "float32", make_placement(devices)))
    prompt = np.random.default_rng(5).integers(3, SHARED["vocab_size"], (1, 9))
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = model.generate(torch.from_numpy(prompt), **options)[0, 9:].tolist()
    one = Model(dataclasses.replace(config, max_model_len=256), weights)
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    sizes = {"max_num_seqs": 2, "num_pages": 40, "max_model_len": 256, "tensor_parallel_size": devices}
    (ours,) = tiny_models.outputs(tiny_models.engine(one, speculative, **sizes), prompt.tolist(), params(NEW)[0])
    return ours, theirs
