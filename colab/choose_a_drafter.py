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
# # Choose a drafter
#
# A drafter pays if its drafts are accepted often enough for what they cost:
#
# speed-up = tokens per round / cost of a round, in steps of plain decoding.
#
# Here several methods write the same text side by side. For each method we measure how often its drafts are accepted at
# each position, and what its rounds cost, by the bytes they read and by the clock. From both follows a predicted
# speed-up, which we compare with the measured one.
#
# Sizes: a target of 135 million parameters (a download of 98 MB, once) and a head of 15 million, which comes with
# jaxspec. All cells together take three to four minutes on two CPU cores, half of it compiling.
#
# **The stored outputs** are from two CPU cores, which did other work at the same time, so times vary from run to run.
# On a TPU the costs by the clock and the speeds differ. None of these notebooks has been run on a TPU so far.
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
# ## 2. The methods
# The methods below need no further download. There is a line for a drafter of your own: a folder that
# [train_a_drafter](train_a_drafter.ipynb) wrote, or a head from the hub for another target. All methods:
# docs/drafters.md.
#
# The texts are of two kinds: in `echo` much of the answer is in the prompt already, in `fresh` it is not. Some methods
# are good at one kind only.

# %%
TARGET = "smollm2-135m-instruct"
NUM_DRAFTS = 4  # K, draft tokens a round
METHODS = {
    # Finds the last tokens earlier in the text and proposes what followed them there.
    "ngram": {"method": "ngram"},
    # The same, weighing all places where they occur.
    "suffix": {"method": "suffix"},
    # A head trained for this target, whose hidden states it reads.
    "eagle3": {"model": "smollm2-135m-eagle3"},
    # n-gram drafts where they find something, the head elsewhere.
    "ngram+eagle3": {"method": "ngram+eagle3", "model": "smollm2-135m-eagle3"},
    # "mine": {"model": "my-draft"},
}
TEXTS = {
    "echo": [
        "Repeat this text: The old mill stands by the river, where the miller's daughter feeds the ducks. Every "
        "morning the ducks wait by the mill, and every evening the miller counts the ducks that sleep by the river.",
        "List the days of the week, then list them again, then list them a third time.",
    ],
    "fresh": [
        "Why is the sky blue during the day but red at sunset?",
        "Write a Python function that takes a list of integers and returns the largest.",
    ],
}
CALIBRATION = "Describe a day in the life of a lighthouse keeper."  # for the cost of a round, the same for any text
MAX_TOKENS = 64
HEATS = 3  # timed heats, of which the fastest counts

# %% [markdown]
# ## 3. Measure
# All methods share the target's weights and decode one request at a time, with K drafts in every round. Decoding is
# greedy and in float32, so all methods must write the same text. They take turns, so that a disturbance of the machine
# hits all of them. The first heat compiles and does not count. This takes two to three minutes on two CPU cores.

# %%
import dataclasses

from jaxspec import LLM, SamplingParams

plain = LLM(TARGET, dtype="float32", max_model_len=512, max_num_seqs=1, enable_prefix_caching=False)
always = {"num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
llms = {"plain": plain} | {name: plain.speculating({**method, **always}) for name, method in METHODS.items()}
chat = lambda text: plain.render_chat([{"role": "user", "content": text}])
prompts = {kind: [chat(text) for text in texts] for kind, texts in TEXTS.items()}
prompts["calibration"] = [chat(CALIBRATION)]
greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


@dataclasses.dataclass
class Run:
    """One method's answers to one kind of text."""

    ids: list
    accepted: list  # accepted draft tokens, by position
    drafting: int  # rounds with drafts
    seconds: float

    @property
    def tokens(self):
        return sum(map(len, self.ids))

    @property
    def rounds(self):
        """Number of rounds. A round emits its accepted drafts and one token more, unless it ends the answer."""
        return max(self.tokens - sum(self.accepted), self.drafting)


def answer(llm, prompts):
    spent = llm.timing.decode_seconds  # without compiling
    outputs = llm.generate(prompts, greedy, progress=False)
    counts = [output.metrics for output in outputs]
    return Run(
        ids=[output.outputs[0].token_ids for output in outputs],
        accepted=[sum(column) for column in zip(*(c.num_accepted_tokens_per_pos for c in counts), strict=True)],
        drafting=sum(c.num_drafts for c in counts),
        seconds=llm.timing.decode_seconds - spent,
    )


runs = {}
for heat in range(1 + HEATS):
    for kind in prompts:
        for name, llm in llms.items():
            run = answer(llm, prompts[kind])
            if heat and (heat == 1 or run.seconds < runs[name, kind].seconds):
                runs[name, kind] = run
for name in METHODS:
    same = all(runs[name, kind].ids == runs["plain", kind].ids for kind in TEXTS)
    print(f"{name:<18} same text as plain decoding: {same}")

# %% [markdown]
# ## 4. How often are drafts accepted?
# **The curves:** the share of all rounds that accepted at least one draft token, two, and so on. The sum over the
# positions, plus one, is the mean number of tokens per round.

# %%
import matplotlib.pyplot as plt

COLOURS = dict(zip(METHODS, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
DASHES = {name: "-:"[i % 2] for i, name in enumerate(METHODS)}  # so that two curves in the same place are both visible
positions = range(1, NUM_DRAFTS + 1)
figure, axes = plt.subplots(1, len(TEXTS), figsize=(11, 3.6), layout="constrained", sharey=True)
for kind, panel in zip(TEXTS, axes, strict=True):
    for name in METHODS:
        run = runs[name, kind]
        style = {"color": COLOURS[name], "linestyle": DASHES[name], "marker": "o", "label": name}
        panel.plot(positions, [n / run.rounds for n in run.accepted], **style)
        print(f"{kind:<6} {name:<18} {run.tokens / run.rounds:.2f} tokens a round")
    panel.set(title=f"Acceptance by position: {kind}", xlabel="position in the round", xticks=positions, ylim=(0, 1.05))
axes[0].set_ylabel("share of rounds")
axes[-1].legend(loc="upper right", frameon=False)
plt.show()

# %% [markdown]
# ## 5. What does a round cost?
# Decoding one request mostly consists of reading weights. A plain step reads the target's weights once. A round reads
# them once too, in one pass over K + 1 tokens, and the drafter's weights once in each of its passes. Counted in bytes
# (`jaxspec/bench/floors.py`), the cost of a round in plain steps is
#
# (bytes of the target + bytes of the drafter's passes) / bytes of the target.
#
# By the clock a round costs more: a device that computes slowly, such as a CPU, needs time for K + 1 tokens, and many
# small passes take time too. We measure this on a separate text.

# %%
from jaxspec.bench import floors

CONTEXT = 128  # positions whose keys and values a pass reads


def round_bytes(llm):
    """Return the bytes that the target's pass of a round reads, and those of the drafter's passes."""
    runner, drafter = llm.engine.runner, llm.engine.runner.decoding.drafter
    params, target = runner.params, floors.pass_bytes(runner.paged["target"], runner.params["target"], 1, CONTEXT)
    if "draft" not in params:
        return target, 0.0
    drafter = getattr(drafter, "draft", drafter)  # of ngram+eagle3, the part with weights
    return target, floors.drafting_bytes(drafter, params["target"], params["draft"], 1, CONTEXT)


per_round = lambda name: runs[name, "calibration"].seconds / runs[name, "calibration"].rounds
cost = {}
for name in METHODS:
    target, drafting = round_bytes(llms[name])
    cost[name] = {"bytes": (target + drafting) / target, "clock": per_round(name) / per_round("plain")}
    said = f"{target / 1e6:.0f} MB + {drafting / 1e6:.0f} MB, {cost[name]['bytes']:.2f} plain steps by bytes"
    print(f"{name:<18} {said}, {cost[name]['clock']:.2f} by the clock")

# %% [markdown]
# **The bars:** what a round reads (left) and what it costs in plain steps (right); the dashed line is plain decoding.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3.4), layout="constrained", sharey=True)
names, rows = list(METHODS), range(len(METHODS))
of_target, of_drafter = zip(*(round_bytes(llms[name]) for name in names), strict=True)
megabytes = lambda sizes: [size / 1e6 for size in sizes]
left.barh(names, megabytes(of_target), color="#9aa5b1", label="the target's pass")
left.barh(names, megabytes(of_drafter), left=megabytes(of_target), color="#2a7de1", label="the drafter's passes")
left.set(title="What a round reads", xlabel="MB", ylabel="method")
for offset, how, colour in ((-0.2, "bytes", "#9aa5b1"), (0.2, "clock", "#f28e2b")):
    bars = right.barh([i + offset for i in rows], [cost[name][how] for name in names], 0.38, color=colour)
    bars.set_label("by bytes" if how == "bytes" else "by the clock")
    right.bar_label(bars, fmt="%.2f", padding=2)
right.axvline(1, color="black", linestyle="--", linewidth=1)
right.set(title="What a round costs", xlabel="steps of plain decoding")
right.margins(x=0.12)
for axes in (left, right):
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)
left.invert_yaxis()
plt.show()

# %% [markdown]
# ## 6. Is it faster?
# **The picture:** for each method and kind of text, the speed-up that the cost by bytes predicts, the one that the cost
# by the clock predicts, and the measured one. Above it is the number of tokens a second. The dashed line is plain
# decoding.

# %%
HOWS = {"predicted, by bytes": "#9aa5b1", "predicted, by the clock": "#f28e2b", "measured": "#2a7de1"}
figure, axes = plt.subplots(1, len(TEXTS), figsize=(11, 3.8), layout="constrained", sharey=True)
print(f"{'text':<6} {'method':<18} {'by bytes':>9} {'by clock':>9} {'measured':>9} {'tokens/s':>9}")
for kind, panel in zip(TEXTS, axes, strict=True):
    plain_speed = runs["plain", kind].tokens / runs["plain", kind].seconds
    print(f"{kind:<6} {'plain':<18} {'':>9} {'':>9} {'':>9} {plain_speed:9.1f}")
    for row, name in enumerate(METHODS):
        run = runs[name, kind]
        speed = run.tokens / run.seconds
        predicted = [run.tokens / run.rounds / cost[name][how] for how in ("bytes", "clock")]
        speedups = [*predicted, speed / plain_speed]
        print(f"{kind:<6} {name:<18}" + "".join(f" {x:8.2f}x" for x in speedups) + f" {speed:9.1f}")
        bars = panel.bar([row - 0.27, row, row + 0.27], speedups, 0.25, color=list(HOWS.values()))
        panel.bar_label(bars, ["", "", f"{speed:.0f}"], padding=2)
    panel.axhline(1, color="black", linestyle="--", linewidth=1)
    panel.set(title=f"Speed-up: {kind}, plain {plain_speed:.0f} tokens/s", xticks=rows, xticklabels=names)
    panel.margins(y=0.15)
axes[0].set_ylabel("times plain decoding")
figure.legend([plt.Rectangle((0, 0), 1, 1, color=c) for c in HOWS.values()], HOWS, loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# ## 7. What to take from it
# - n-gram drafting reads no weights, but gains only where the text repeats itself or its prompt (summaries, rewriting,
#   editing of code). A head or draft model that was trained for the target gains on any text.
# - `"ngram+"` before a method's name combines both.
# - A better draft helps only if its cost does not grow as much. Compare tokens per round and cost together, not the
#   acceptance length alone.
# - In production leave `adaptive` on: jaxspec measures cost and acceptance while it runs. Where drafts do not pay, it
#   drafts less or not at all.
# - `jaxspec bench --model TARGET --draft DRAFT --stages target,draft,round -k 4` times every part for another target,
#   beside the limits of the device (docs/benchmarks.md).
# - [train_a_drafter](train_a_drafter.ipynb) makes one more row of this table.
