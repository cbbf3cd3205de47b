# ---
# jupyter:
#   accelerator: TPU
#   colab:
#     provenance: []
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Train a drafter
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/train_a_drafter.ipynb)
#
# From a target to a draft of your own: the target writes text, a small drafter learns from it, its curve is drawn, and
# then it is measured: which drafts are accepted, and how much faster the target writes with them, the same text.
#
# Sizes: the target has 135 million parameters (a download of 98 MB, once). On one accelerator an EAGLE-3 head is
# trained, which reads the target's hidden states: minutes in all, of which `MINUTES` are for training. On a CPU it is a
# toy, a small draft model that learns just enough for the curve to move, in two to four minutes on two cores: no
# speed-up is to be expected there.
#
# ## 1. Install
# Colab's own JAX is older than jaxspec needs. The cell upgrades it for this runtime and says whether to restart the
# session: one to three minutes. Where jaxspec is installed already, it changes nothing.

# %%
import glob
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

SOURCE = "git+https://github.com/jaxspec/jaxspec"  # or a folder, such as /content/jaxspec


def runtime():
    """What pip has to know: the kind of device, found without JAX."""
    if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*") or "TPU_WORKER_ID" in os.environ:
        return "tpu"
    return "cuda12" if shutil.which("nvidia-smi") else ""


found = importlib.util.find_spec("jaxspec")
if found and found.origin:  # a folder of that name is none
    print("jaxspec is installed.")
else:
    loaded = "jax" in sys.modules
    before = importlib.metadata.version("jax") if importlib.util.find_spec("jax") else None
    folder = pathlib.Path(SOURCE)
    wanted = f"{folder}[{runtime()}]" if folder.exists() else f"jaxspec[{runtime()}] @ {SOURCE}"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-U", wanted.replace("[]", "")], check=True)
    after = importlib.metadata.version("jax")
    print(f"jax {before} -> {after}")
    if loaded and before != after:
        print("RESTART the session now (Runtime, Restart session): the old JAX is still loaded. Then run all cells.")
    else:
        print("No restart is needed.")

# %% [markdown]
# ## 2. Sizes
# All of them in one place. More text and more minutes make a better draft; nothing else has to be changed.

# %%
import pathlib
import tempfile

import jax

TARGET = "smollm2-135m-instruct"  # or any other: a hub id, a folder
FOLDER = pathlib.Path(tempfile.mkdtemp())  # on Colab, a folder of a mounted drive outlasts the session
SEED = 0

if jax.default_backend() == "cpu":
    METHOD, SHAPE = "draft_model", {"vocab_size": 4096}  # see `jaxspec train-draft --help`
    TOKENS, LENGTH, MIXTURE = 4_000, 128, {"chat": 1.0, "story": 1.0, "list": 1.0}
    SHARD_SIZE = 16  # sequences; the smallest piece of data
    MINUTES, STEPS, BATCH_SIZE, WARMUP, EVAL_EVERY = None, 40, 4, 4, 10
    EVAL_PROMPTS, NUM_DRAFTS = 4, 2
else:
    METHOD, SHAPE = "eagle3", {}
    TOKENS, LENGTH, MIXTURE = 4_000_000, 512, None  # None: what docs/training.md describes
    SHARD_SIZE = 4096
    MINUTES, STEPS, BATCH_SIZE, WARMUP, EVAL_EVERY = 4.0, 5_000, 32, 100, 200
    EVAL_PROMPTS, NUM_DRAFTS = 32, 4
print(f"{METHOD} for {TARGET} on {jax.devices()[0].device_kind}, in {FOLDER}")
print(f"{TOKENS:,} tokens of text, then " + (f"{MINUTES:g} minutes" if MINUTES else f"{STEPS} steps") + " of training")

# %% [markdown]
# ## 3. The target writes
# A drafter learns what *this* target would say, so the target writes its data itself: it answers prompts that come
# from a grammar, or that it makes up. Waiting time: half a minute for 4 million tokens on an H200, after
# compiling; in proportion longer on smaller accelerators; one minute for 4,000 tokens on two CPU cores. On the command
# line:
# `jaxspec generate-data --target smollm2-135m-instruct --out data --tokens 4000000`

# %%
import checkpoints
from jaxspec import LLM
from jaxspec.train.data_options import DataOptions
from jaxspec.train.generate import generate
from jaxspec.train.writer import engine_options

mixture = {} if MIXTURE is None else {"mixture": MIXTURE}
data = DataOptions(tokens=TOKENS, length=LENGTH, shard_size=SHARD_SIZE, seed=SEED, **mixture)
options = engine_options(data, checkpoints.load_config(checkpoints.resolve(TARGET)))
written = generate(LLM(TARGET, **options), FOLDER / "data", data, target=TARGET)
print(f"\n{written['sequences']} sequences, {written['tokens']} tokens")

# %% [markdown]
# ## 4. The drafter learns
# The loss is forward KL plus total variation, between the drafter's law and the target's. Total variation is 1 minus
# the probability that a draft is accepted, so what is minimised is what is wanted. Every `EVAL_EVERY` steps the engine
# itself measures the acceptance length on held-out prompts and keeps the best drafter so far.
#
# Waiting time: `MINUTES` on an accelerator (compiling included), one to two minutes on two CPU cores. On the command
# line: `jaxspec train-draft --method eagle3 --data data --out draft --minutes 4`. `METHOD = "draft_model"` trains a
# small model of its own instead of a head.

# %%
from jaxspec.train.loop import train
from jaxspec.train.options import TrainOptions

draft = train(
    TrainOptions(
        data=FOLDER / "data",
        out=FOLDER / "draft",
        target=TARGET,
        method=METHOD,
        length=LENGTH,
        steps=STEPS,
        minutes=MINUTES,
        batch_size=BATCH_SIZE,
        warmup=WARMUP,
        eval_every=EVAL_EVERY,
        eval_prompts=EVAL_PROMPTS,
        num_speculative_tokens=NUM_DRAFTS,
        seed=SEED,
        **SHAPE,
    )
)
print("\nthe drafter:", draft)

# %% [markdown]
# **The curves:** left the loss; in the middle the chance that a draft is accepted when sampling; right what all of it
# is for, the tokens of a round on held-out prompts, of which 1 is plain decoding and K + 1 the most that there is.

# %%
import json

import matplotlib.pyplot as plt

rows = [json.loads(line) for line in (draft / "metrics.jsonl").read_text().splitlines()]
learning = [row for row in rows if "loss" in row]
measured = [row for row in rows if "acceptance_length" in row]

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.5), layout="constrained")
left.plot([row["step"] for row in learning], [row["loss"] for row in learning], marker=".")
left.set(title="Loss", xlabel="step", ylabel="KL + total variation", ylim=(0, None))
middle.plot([row["step"] for row in learning], [1 - row["tv"] for row in learning], marker=".")
middle.set(title="Expected acceptance", xlabel="step", ylabel="1 - total variation", ylim=(0, 1))
right.plot([row["step"] for row in measured], [row["acceptance_length"] for row in measured], marker="o")
right.axhline(1, color="grey", linestyle="--", linewidth=1)
right.set(title="Acceptance length, held out, greedy", xlabel="step", ylabel="tokens a round", ylim=(0, NUM_DRAFTS + 1))
plt.show()
first, last, best = learning[0], learning[-1], max(measured, key=lambda row: row["acceptance_length"])
print(f"loss {first['loss']:.3f} at step {first['step']}, {last['loss']:.3f} at step {last['step']}")
print(f"best acceptance length {best['acceptance_length']:.2f}, at step {best['step']}")

# %% [markdown]
# ## 5. Which drafts are accepted?
# Prompts that the training data cannot hold, answered greedily with K drafts in every round. Everything from here on is
# in float32, in which speculation changes not one token of greedy text. Half a minute: loading, compiling, answering.

# %%
from jaxspec import SamplingParams

PROMPTS = [
    "Why is the sky blue during the day but red at sunset?",
    "Tell me a story about a snail that enters a race.",
    "Write a Python function that takes a list of integers and returns the largest.",
    "Name five things that one needs for baking bread.",
]
MAX_TOKENS = 64

speculative = {"model": str(draft), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
llm = LLM(TARGET, speculative_config=speculative, dtype="float32", max_model_len=512, max_num_seqs=1)
prompts = [llm.render_chat([{"role": "user", "content": text}]) for text in PROMPTS]
greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


def answers(llm):
    """The ids of all answers, one prompt at a time, and the tokens a second; compiling is not counted."""
    before = llm.timing.as_dict()
    ids = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, progress=False)]
    return ids, sum(map(len, ids)) / (llm.timing.decode_seconds - before["decode_seconds"])


answers(llm)
counts = llm.metrics
shares = [n / max(counts.num_drafts, 1) for n in counts.num_accepted_tokens_per_pos]
print(f"{counts.mean_acceptance_length:.2f} tokens a round")

# %% [markdown]
# **The bars:** the share of rounds that kept the first, the second, ... draft; each can only be kept where all before
# it were.

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
bars = axes.bar(range(1, NUM_DRAFTS + 1), shares)
axes.bar_label(bars, [f"{share:.0%}" for share in shares])
axes.set_xticks(range(1, NUM_DRAFTS + 1))
axes.set(title=f"Acceptance by position, {METHOD}", xlabel="position in the round", ylabel="share of rounds")
axes.set_ylim(0, 1.1)
plt.show()

# %% [markdown]
# ## 6. Is it faster?
# The same prompts, plainly and with the drafter, in turns, so that whatever disturbs the machine disturbs both; the
# best of three counts. Half a minute.

# %%
plain = llm.speculating(None)  # the same weights, no drafts
speeds = {"plain": 0.0, METHOD: 0.0}
texts = {}
for _ in range(3):
    for name, engine in {"plain": plain, METHOD: llm}.items():
        texts[name], speed = answers(engine)
        speeds[name] = max(speeds[name], speed)
same = texts["plain"] == texts[METHOD]
print(f"plain {speeds['plain']:.1f} tokens/s, {METHOD} {speeds[METHOD]:.1f} tokens/s")
print(f"speed-up {speeds[METHOD] / speeds['plain']:.2f}x, same text: {same}")

# %% [markdown]
# **The bars:** tokens a second, plainly and with the drafter. Here K drafts are made in every round; by default jaxspec
# makes none where they do not pay.

# %%
figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
bars = axes.bar(list(speeds), list(speeds.values()), color=["#9aa5b1", "#2a7de1"])
axes.bar_label(bars, [f"{speed:.0f}" for speed in speeds.values()])
axes.set(title="Plain beside speculative, greedy", ylabel="tokens a second", ylim=(0, 1.15 * max(speeds.values())))
plt.show()

# %% [markdown]
# ## 7. Next
# - Keep it: copy the folder `draft`. `LLM(TARGET, speculative_config={"model": "that/folder"})` reads it anywhere, and
#   `jaxspec serve TARGET --draft that/folder` serves with it.
# - Train on: more `TOKENS` (a good draft of this target had 150 million) and more `MINUTES`; a run that was ended goes
#   on with `resume=True`. What pays is written down in docs/training.md.
# - [choose_a_drafter](choose_a_drafter.ipynb) puts it beside the other methods: add a line with its folder.
# - [trace_a_round](trace_a_round.ipynb) shows what becomes of a draft in a round.
