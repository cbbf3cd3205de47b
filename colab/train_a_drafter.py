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
# This notebook trains a drafter for a target. The target writes text, and a small drafter learns from it. Then we
# measure which drafts are accepted, and how much faster the target writes the same text with them.
#
# Sizes: the target has 135 million parameters (a download of 98 MB, once). On an accelerator the drafter is an EAGLE-3
# head, which reads the target's hidden states. That takes minutes in all, of which `MINUTES` are for training. On a CPU
# the drafter is only a toy: a small draft model that learns just enough for the loss to fall, in two to four minutes on
# two cores. Expect no speed-up there.
#
# **The stored outputs** are from two CPU cores, which did other work at the same time. They show the toy, and the
# difference between its two speeds is noise. On a TPU the notebook trains the head instead, and all numbers differ.
# None of these notebooks has been run on a TPU so far.
#
# ## 1. Install
# This cell installs jaxspec from `SOURCE`, or from the clone that this notebook is in. Colab's own JAX is older than
# jaxspec needs. The cell upgrades it for this runtime, in one to three minutes, and says whether to restart the
# session. Where jaxspec is installed already, the cell changes nothing.

# %%
import glob
import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys

SOURCE = "/content/jaxspec"  # a folder with jaxspec's repository, or its address for pip (git+https://...)


def python(*arguments):
    """Run Python in a new process. Return its error in one line, or "" if it succeeds."""
    environment = os.environ | {"GIT_TERMINAL_PROMPT": "0"}  # git fails where it would ask for a password
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()] or ["no error message"]
    named = [line for line in lines if line.startswith(("fatal:", "ERROR:"))] or lines
    return named[-1] if result.returncode else ""


def version(distribution):
    """Return the installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def places():
    """Yield the URLs to install from: SOURCE, then the clone that this notebook is in."""
    if "://" in SOURCE:
        yield SOURCE
    here = pathlib.Path.cwd()
    for folder in (pathlib.Path(SOURCE), here, *here.parents):
        if (folder / "jaxspec" / "decode" / "round.py").is_file():
            yield folder.resolve().as_uri()


def extras():
    """Return jaxspec's extras for this device, found without JAX."""
    if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*") or "TPU_WORKER_ID" in os.environ:
        return "plots,tpu"
    return "plots,cuda12" if shutil.which("nvidia-smi") else "plots"


CHECK = ["-c", "from jaxspec import LLM"]  # fails for the other project whose package is named jaxspec, too
if not python(*CHECK):
    print("jaxspec is installed.")
elif other := version("jaxspec"):
    raise SystemExit(
        f"Another project's package jaxspec {other} is installed. Run `!pip uninstall -y jaxspec`, then this cell."
    )
else:
    loaded, before = "jax" in sys.modules, version("jax")
    problem = "there is no such folder, and this notebook is in no clone"
    for place in places():
        wanted = f"jaxspec-decoding[{extras()}] @ {place}"  # pip's `jaxspec` is the other project
        problem = python("-m", "pip", "install", "-q", "-U", wanted) or python(*CHECK)
        if not problem:
            break
    if problem:
        raise SystemExit(
            f"jaxspec cannot be installed from {SOURCE}: {problem}. "
            "Set SOURCE to the folder or the address of its repository, then run this cell again."
        )
    print(f"jax {before} -> {version('jax')}")
    if loaded and before != version("jax"):
        print("RESTART the session now (Runtime, Restart session): the old JAX is still loaded. Then run all cells.")
    else:
        print("No restart is needed.")

# %% [markdown]
# ## 2. Sizes
# All sizes are set here. For a better draft, raise the amount of text and the minutes; nothing else has to change.

# %%
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
print(f"{METHOD} for {TARGET} on {jax.devices()[0].device_kind}")
print(f"{TOKENS:,} tokens of text, then " + (f"{MINUTES:g} minutes" if MINUTES else f"{STEPS} steps") + " of training")

# %% [markdown]
# ## 3. The target writes
# A drafter learns what *this* target would say, so the target writes the training data itself. It answers prompts that
# come from a grammar or that it makes up. After compiling, this takes half a minute for 4 million tokens on an H200,
# longer in proportion on smaller accelerators, and one minute for 4,000 tokens on two CPU cores. On the command line:
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
# The loss is forward KL plus total variation, between the drafter's distribution and the target's. Total variation is 1
# minus the probability that a draft token is accepted, so minimising it raises acceptance. Every `EVAL_EVERY`
# steps the engine itself measures the acceptance length on held-out prompts, and the best drafter so far is saved.
#
# This takes `MINUTES` on an accelerator (compiling included), one to two minutes on two CPU cores. On the command line:
# `jaxspec train-draft --method eagle3 --data data --out draft --minutes 4`. `METHOD = "draft_model"` trains a small
# model of its own instead of a head.

# %%
from jaxspec.train.loop import train
from jaxspec.train.train_options import TrainOptions

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
print("saved:", ", ".join(sorted(path.name for path in draft.iterdir())))

# %% [markdown]
# **The curves:** left the loss; in the middle the probability that a draft token is accepted when sampling; right the
# measured tokens per round on held-out prompts, between 1 (plain decoding) and K + 1.

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
# We answer prompts that the training data cannot contain, greedily and with K drafts in every round. From here on
# everything is in float32, where speculation does not change a single token of greedy text. Loading, compiling and
# answering take half a minute.

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
    """Answer all prompts. Return the ids and the tokens a second, compiling excluded."""
    before = llm.timing.as_dict()
    ids = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy, progress=False)]
    return ids, sum(map(len, ids)) / (llm.timing.decode_seconds - before["decode_seconds"])


answers(llm)
counts = llm.metrics
shares = [n / max(counts.num_drafts, 1) for n in counts.num_accepted_tokens_per_pos]
print(f"{counts.mean_acceptance_length:.2f} tokens a round")

# %% [markdown]
# **The bars:** the share of rounds that accepted the first, the second, ... draft token. A draft token can only be
# accepted if all before it in the round were.

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
# We answer the same prompts plainly and with the drafter. Both take turns, so that a disturbance of the machine hits
# both, and the best of three runs counts. This takes half a minute.

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
# **The bars:** tokens a second of plain decoding and with the drafter. Here every round has K drafts; by default
# jaxspec makes none where they do not pay.

# %%
figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
bars = axes.bar(list(speeds), list(speeds.values()), color=["#9aa5b1", "#2a7de1"])
axes.bar_label(bars, [f"{speed:.0f}" for speed in speeds.values()])
axes.set(title="Plain beside speculative, greedy", ylabel="tokens a second", ylim=(0, 1.15 * max(speeds.values())))
plt.show()

# %% [markdown]
# ## 7. Next
# - Keep it: copy `FOLDER / "draft"`. `LLM(TARGET, speculative_config={"model": "that/folder"})` reads it anywhere, and
#   `jaxspec serve TARGET --draft that/folder` serves with it.
# - Train longer: more `TOKENS` (a good draft of this target had 150 million) and more `MINUTES`. An interrupted run
#   continues with `resume=True`. docs/training.md describes what improves a drafter.
# - [choose_a_drafter](choose_a_drafter.ipynb) compares it with the other methods: add a line with its folder.
# - [trace_a_round](trace_a_round.ipynb) shows what happens to a draft token in a round.
