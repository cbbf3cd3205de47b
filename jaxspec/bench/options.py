"""What `jaxspec bench` was asked for, checked before anything is loaded or measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.common.errors import UserError
from jaxspec.common.values import one_of
from jaxspec.options.engine import DTYPES, KERNELS, MAX_ROUNDS, EngineConfig
from jaxspec.options.sampling_params import SamplingParams
from jaxspec.options.speculative import SpeculativeConfig

if TYPE_CHECKING:
    from jaxspec.models.config import ModelConfig

MODEL_STAGES = ("target", "draft", "round", "propose", "score", "verify", "prefill", "attention")
ENGINE_STAGES = ("plain", "speculative", "adaptive", "load")
STAGES = (*MODEL_STAGES, *ENGINE_STAGES)
ACCEPTING = ("round", "speculative", "adaptive", "load")
DRAFTING = ("propose", "score", "verify", *ACCEPTING)
# Option -> the stages that heed it; what is not here, every stage does.
HEEDED = {
    "contexts": tuple(stage for stage in STAGES if stage != "load"),
    "launches": tuple(stage for stage in STAGES if stage != "load"),
    "draft": ("draft", *DRAFTING),
    "draft_tensor_parallel_size": ("draft", *DRAFTING),
    "ks": ("attention", *DRAFTING),
    "tree": DRAFTING,
    "lengths": ACCEPTING,
    "rates": ACCEPTING,
    "temperature": ("target", "draft", "propose", "verify", "plain", *ACCEPTING),
}
FLAGS = {
    "contexts": "--context",
    "ks": "-k",
    "lengths": "--synthetic-acceptance-length",
    "rates": "--synthetic-acceptance-rates",
    "texts": "--prompts",
}  # where they have another name
ADAPTIVE_LENGTHS = (1.2, 2.0, 3.0, 4.0)
ROUNDS = MAX_ROUNDS  # of a launch, as the engine's own are in generate
FIRST_ROUNDS = 4  # of the untimed step before each timed one of the engine


def launch_tokens(k: int) -> int:
    """Positions after the context that a launch may write, were every draft accepted."""
    return ROUNDS * (k + 1) + k + 1


def engine_tokens(k: int) -> int:
    """Output that a timed step and the one before it may give; a row that ended would distort it."""
    return (FIRST_ROUNDS + ROUNDS) * (k + 1) + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """The workload of the stage `load`. The first sentence of each is the command line's help.

    Args:
      requests: Of the stage load: how many.
      prompt_tokens: Of the stage load: tokens of a prompt, shortest and longest.
      output_tokens: Of the stage load: tokens of an answer, shortest and longest.
      rate: Of the stage load: requests that arrive a second; 0: all at once.
      texts: Prompts in place of random ids.
      max_model_len: Of the stage load: the engine's own; as long as the longest request.
      runs: Of the stage load: how often, the first while programs are compiled.
      seed: Of the stage load.
    """

    requests: int = 256
    prompt_tokens: tuple[int, ...] = (128, 1024)
    output_tokens: tuple[int, ...] = (64, 256)
    rate: float = 0.0
    texts: tuple[str, ...] = ()
    max_model_len: int | None = None
    runs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "runs"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} is below 1")
        for name in ("prompt_tokens", "output_tokens"):
            first, *last = getattr(self, name)
            if len(last) > 1 or (last and last[0] < first):
                raise UserError(f"--{name.replace('_', '-')}: give the shortest and the longest, 128,1024")
        if self.texts and self.prompt_tokens != Load.prompt_tokens:
            raise UserError("--prompt-tokens is the length of random prompts, --prompts gives others: drop one of them")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed} is below 0")
        if not 0 <= self.rate < float("inf"):
            raise UserError(f"--rate {self.rate} must be 0 or more requests a second")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how. The first sentence of each is the command line's help.

    Args:
      preset: Random weights of public shapes, as qwen3-8b+qwen3-0.6b or qwen3-8b+eagle3.
      model: A real one.
      draft: The draft of --model; n-gram without one.
      batch_sizes: One or several: 1,16.
      contexts: Tokens in the caches, one or several.
      ks: One or several: 2,4,6.
      tree: Width, depth and nodes of a tree of drafts, which stands in place of K: 4,4,17.
      lengths: Tokens a round, one or several; where K adapts, of drafts that fade. Real acceptance without it.
      rates: How often the first, second, ... draft is kept, in place of a length: 0.74,0.55.
      dtype: auto, float32, bfloat16 or float16.
      stages: Of target,draft,round,...; all but adaptive and load.
      temperature: 0 is greedy.
      kernels: reference or pallas; the platform's best.
      launches: Timed launches a figure.
      tensor_parallel_size: Devices that the target is cut over.
      draft_tensor_parallel_size: Parts that the draft is cut into; what pays most.
    """

    preset: str | None = None
    model: str | None = None
    draft: str | None = None
    batch_sizes: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (512,)
    ks: tuple[int, ...] = (4,)
    tree: tuple[int, ...] = ()
    lengths: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    dtype: str = EngineConfig.dtype
    stages: tuple[str, ...]
    temperature: float = 0.0
    kernels: str | None = None
    launches: int = 12
    tensor_parallel_size: int = 1
    draft_tensor_parallel_size: int | None = None
    load: Load = Load()

    def __post_init__(self) -> None:
        if (self.preset is None) == (self.model is None):
            raise UserError("give one of --preset (random weights) and --model (a real model)")
        if self.preset is not None:
            from jaxspec.bench import presets

            if self.draft is not None:
                raise UserError(f"--draft {self.draft} goes with --model: give a preset's draft as target+draft")
            target, draft = presets.split(self.preset)
            for name in (target, draft) if draft and draft not in presets.HEADS else (target,):
                self.check_context(name, presets.preset(name))
        for stage in self.stages:
            one_of("--stages", stage, STAGES)
        self.check_heeded()
        if self.tree:
            if self.ks not in (Options.ks, (self.tree[-1] - 1,)):
                raise UserError(f"--tree stands in place of -k {','.join(map(str, self.ks))}: leave that out")
            if len(self.tree) != 3 or self.draft_name is None:
                said = ",".join(map(str, self.tree))
                raise UserError(f"--tree {said}: give width,depth,nodes, and a draft that grows it")
            object.__setattr__(self, "ks", (self.tree[2] - 1,))
        one_of("--dtype", self.dtype, DTYPES)
        if self.kernels is not None:
            one_of("--kernels", self.kernels, KERNELS)
        SamplingParams(temperature=self.temperature)  # refuses what it cannot be
        if self.launches < 1:
            raise UserError(f"--launches {self.launches} is below 1")
        if "draft" in self.stages and self.draft_name is None:
            raise UserError("--stages draft needs a draft model: give --preset target+draft, or --model and --draft")
        if "draft" in self.stages and self.head:
            raise UserError(f"--stages draft: {self.head} is no model that decodes by itself; take the stage propose")
        for k in self.ks:
            for length in self.lengths:
                if length > k + 1:
                    raise UserError(
                        f"--synthetic-acceptance-length {length:g} is out of reach with K = {k}, a round yields at "
                        f"most {k + 1} tokens: lower it or leave that K out"
                    )
            if self.rates and len(self.rates) != k:
                raise UserError(
                    f"--synthetic-acceptance-rates gives {len(self.rates)} rates, K = {k} needs {k}: give as many, or "
                    "leave that K out"
                )
            for acceptance in self.acceptances("speculative", k):
                self.speculation(k, *acceptance, adaptive=False)  # refuses what it cannot be

    def check_heeded(self) -> None:
        """Raise UserError for an option that would be ignored."""
        if self.rates and self.lengths:
            raise UserError("--synthetic-acceptance-rates and --synthetic-acceptance-length are both given: drop one")
        if self.draft_tensor_parallel_size is not None and self.draft_name is None:
            raise UserError("--draft-tensor-parallel-size needs a draft: give --preset target+draft, or --draft")
        if self.load.texts and self.preset is not None:
            raise UserError("--prompts: random weights read no text: give --model in place of --preset")
        changed = lambda options, name: getattr(options, name) != getattr(type(options), name)
        heeded = {name: stages for name, stages in HEEDED.items() if changed(self, name)}
        heeded |= {name: ("load",) for name in vars(self.load) if changed(self.load, name)}
        for name, stages in heeded.items():
            if name in HEEDED and name != "temperature" and self.draft_name is None:
                stages = tuple(stage for stage in stages if stage != "load")  # which then decodes plainly
            if not set(stages) & set(self.stages):
                flag = FLAGS.get(name, "--" + name.replace("_", "-"))
                if len(stages) == 1:
                    raise UserError(
                        f"{flag} belongs to the stage {stages[0]}, which is not asked for: add --stages {stages[0]}"
                    )
                raise UserError(
                    f"{flag} belongs to the stages {', '.join(stages)}, none of which is asked for: add one to "
                    "--stages, or leave it out"
                )

    @property
    def draft_name(self) -> str | None:
        return self.draft if self.preset is None else self.pair[1]

    @property
    def head(self) -> str | None:
        """The method of a preset's head beside its target."""
        from jaxspec.bench import presets

        return self.draft_name if self.preset and self.draft_name in presets.HEADS else None

    @property
    def name(self) -> str:
        return "+".join(part for part in (self.model or self.pair[0], self.draft_name) if part)

    @property
    def pair(self) -> tuple[str, str | None]:
        """The preset's target and draft."""
        from jaxspec.bench import presets  # with jax, which --help does without

        return presets.split(self.preset or "")

    def check_context(self, name: str, config: ModelConfig) -> None:
        """Raises UserError where the model's context does not hold what will be written."""
        context, k = max(self.contexts), max(self.ks)
        need = context + max(launch_tokens(k), engine_tokens(k))
        if need > config.max_model_len:
            raise UserError(
                f"--context {context} is too long for {name}: with the output that is timed {need} positions are "
                f"needed, it has {config.max_model_len}: lower --context or -k"
            )

    def acceptances(self, stage: str, k: int) -> tuple[tuple[float | None, tuple[float, ...]], ...]:
        """Return (tokens a round, how often the first, second, ... draft is kept) for each acceptance that this stage
        is measured at; (None, ()) is the real one."""
        if self.rates:
            return ((1 + sum(self.rates), self.rates),)
        lengths = self.lengths
        if stage == "adaptive":
            lengths = lengths or tuple(a for a in ADAPTIVE_LENGTHS if a <= k + 1)
        rates = fading_rates if stage in ("adaptive", "load") else whole_rates
        return tuple((length, rates(k, length)) for length in lengths) or ((None, ()),)

    def speculation(
        self, k: int, length: float | None = None, rates: tuple[float, ...] = (), *, adaptive: bool
    ) -> SpeculativeConfig:
        """Return the configuration of K drafts at one of the `acceptances`."""
        synthetic: dict[str, Any] = {}
        if length is not None:
            synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        draft = {"model": self.draft_name} if self.head is None else {"method": self.head, "model": self.head}
        tree: dict[str, Any] = dict(zip(("tree_width", "tree_depth", "tree_nodes"), self.tree, strict=False))
        return SpeculativeConfig(**draft, **tree, num_speculative_tokens=k, adaptive=adaptive, **synthetic)


def whole_rates(k: int, length: float) -> tuple[float, ...]:
    """How often the first, second, ... of k drafts is kept, where the first ones always are and the last ones never."""
    return tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(k))


def fading_rates(k: int, length: float) -> tuple[float, ...]:
    """How often the first, second, ... of k drafts is kept, so that a round yields `length` tokens on the average: each
    is kept as often after those before it. So real drafts fade. (A length by itself stands for whole drafts that are
    always kept, of which an adaptive engine soon drafts just as many.)"""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, k + 1)) < length - 1 else (low, middle)
    return tuple(high**i for i in range(1, k + 1))


def listed(
    option: str, text: str, kind: Callable[[str], Any] = int, least: float = 1, *, repeats: bool = False
) -> tuple[Any, ...]:
    """ "1,16" -> (1, 16). repeats: whether a value may come twice."""
    try:
        values = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = ()
    if not values or not all(least <= v < float("inf") for v in values):
        what = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{option} {text!r}: give {what} of at least {least}, with commas between them")
    return values if repeats else tuple(dict.fromkeys(values))


def stages(text: str | None, *, never_slower: bool, draft: bool) -> tuple[str, ...]:
    """The stages in the order of the table; what is unknown stays, to be refused by name. draft: there is a model."""
    default = [s for s in STAGES if s not in ("adaptive", "load") and (draft or s != "draft")]
    asked = default if text is None else [s.strip() for s in text.split(",") if s.strip()]
    if not asked:
        raise UserError(f"--stages {text!r} names no stage: use some of {', '.join(STAGES)}")
    wanted = dict.fromkeys([*asked, *(["adaptive"] if never_slower else [])])
    return tuple(s for s in STAGES if s in wanted) + tuple(s for s in wanted if s not in STAGES)


def check_plot(plot: Path) -> None:
    if plot.suffix != ".png":
        raise UserError(f"--plot {plot}: the picture is a PNG, give a name that ends in .png")
    if not plot.absolute().parent.is_dir():
        raise FileNotFoundError(f"--plot {plot}: the folder {plot.absolute().parent} does not exist: make it first")
