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
# # jaxspec: speculative decoding in one device program
#
# A small *draft* proposes a few tokens. The large *target* checks all of them in one pass and accepts those that it
# would have written itself. The text is exactly the target's; only the time changes. This notebook is for a TPU, a GPU
# or a CPU and picks a pair of models that fits the machine. On two CPU cores all of it takes two to three minutes.
#
# **The stored outputs** are from two CPU cores, which did other work at the same time, so speeds vary from run to run.
# On a TPU or a GPU with enough memory, section 3 loads a larger pair, so all texts and numbers after it differ. None of
# these notebooks has been run on a TPU so far.
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
# ## 2. What is this machine?

# %%
import jax

from jaxspec import LLM, SamplingParams
from jaxspec.inspect import info

devices = jax.devices()
platform = devices[0].platform
stats = devices[0].memory_stats() or {}
memory = stats.get("bytes_limit", 0) / 1e9  # 0 where the device does not report it, as on CPU
WORDS = {
    "tpu": "A TPU: jaxspec was designed for it. This notebook has not been run on one so far.",
    "gpu": "A GPU: everything works, with a larger pair of models where it fits.",
    "cpu": "Only a CPU: everything works, with a small pair of models and modest speed.",
}
print(WORDS.get(platform, f"An unknown platform, {platform}."))
each = f", {memory:.0f} GB each" if memory else ""
print(f"{len(devices)} devices{each}, jax {jax.__version__}: {info.this_device()}")

# %% [markdown]
# ## 3. Load a pair
# With a network and enough memory this loads Qwen3 from the hub. Otherwise it loads a pair that needs no hub:
# SmolLM2-135M-Instruct with two drafters. The first is the head that comes with jaxspec. It was trained for this target
# and reads its hidden states. The second is n-gram drafting. It finds the last tokens earlier in the text and proposes
# what followed them there. It is used wherever it finds something, and the head elsewhere.
#
# Qwen3-8B has 16 GB of weights. With `quantization="int8"` they take 9 GB, which fits on a TPU v5e with 16 GB. Each
# matrix is quantised as soon as it is loaded.
#
# `GEMMA = True` loads Gemma 4 E2B with Google's assistant instead, on a device with 13 GB. The assistant has no keys or
# values of its own: it reads the target's.
#
# Downloads, once: 18 GB for Qwen3-8B and its draft, 6 GB for Qwen3-1.7B and the same draft, or 11 GB for Gemma 4 E2B
# and its assistant, which takes minutes; 98 MB for SmolLM2.

# %%
import urllib.request

from jaxspec.loading.weights import compute_dtype
from pallas_kernels.device import here

GEMMA = False
# The form of the weights, and the memory that the pair needs with room to spare, in GB.
SMALL = [("google/gemma-4-E2B-it", None, 13)]
LARGE = [("Qwen/Qwen3-8B", None, 40), ("Qwen/Qwen3-8B", "int8", 16), ("Qwen/Qwen3-1.7B", None, 12)]
NUM_DRAFTS = 4


def online():
    try:
        urllib.request.urlopen("https://huggingface.co", timeout=5)
        return True
    except OSError:
        return False


factor = compute_dtype("auto", here()).itemsize / 2  # older GPUs compute in float32
fitting = [(name, form) for name, form, needed in (SMALL if GEMMA else LARGE) if memory >= needed * factor]
form = None
if fitting and online():
    model, form = fitting[0]
    drafting = {"model": f"{model}-assistant" if GEMMA else "Qwen/Qwen3-0.6B"}
else:
    model, drafting = "smollm2-135m-instruct", {"method": "ngram+eagle3", "model": "smollm2-135m-eagle3"}

# K drafts in every round, so that the plots show the effect of each K. By default jaxspec chooses K itself.
speculative = {**drafting, "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
sizes = {"max_model_len": 512, "max_num_seqs": 4}
llm = LLM(model, quantization=form, speculative_config=speculative, enable_prefix_caching=False, **sizes)
print(f"{model} with {drafting}, loaded in {llm.timing.load_seconds:.1f} s")

# %% [markdown]
# ## 4. Generate
# The first call compiles, for about half a minute on every device. The compiled programs are cached for the next start.

# %%
max_tokens = 64
greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
QUESTIONS = [
    "Repeat this exactly: the quick brown fox jumps over the lazy dog, and the lazy dog sleeps on.",
    "Write a Python function that adds two numbers, and one that subtracts them.",
    "List the days of the week, then list them again.",
    "What is the capital of France, and what is it known for?",
]
prompts = [llm.render_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
outputs = llm.generate(prompts, greedy)
for question, output in zip(QUESTIONS, outputs, strict=True):
    print(f"\n> {question}\n{output.outputs[0].text.strip()}")
    print(f"[{output.metrics.mean_acceptance_length:.2f} tokens a round]")

# %% [markdown]
# Streaming prints each piece of text as soon as it is generated:

# %%
for piece in llm.stream(prompts[-1], SamplingParams(temperature=0.7, seed=1, max_tokens=max_tokens)):
    print(piece.text, end="", flush=True)

# %% [markdown]
# ## 5. How many drafts are accepted?
# **The pictures:** left, how many rounds accepted 0, 1, 2, ... draft tokens. Right, the share of rounds that accepted
# the first, the second, ... draft token.

# %%
import itertools

import matplotlib.pyplot as plt

counts = [0] * (NUM_DRAFTS + 1)
rounds = 0
for output in outputs:
    m = output.metrics
    reached = [m.num_drafts, *m.num_accepted_tokens_per_pos, 0]  # rounds that accepted at least 0, 1, 2, ... drafts
    counts = [count + a - b for count, (a, b) in zip(counts, itertools.pairwise(reached), strict=True)]
    rounds += m.num_drafts

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
left.bar(range(NUM_DRAFTS + 1), counts)
left.set(title="Accepted drafts in a round", xlabel="draft tokens", ylabel="rounds")
shares = [sum(counts[i:]) / max(rounds, 1) for i in range(1, NUM_DRAFTS + 1)]
bars = right.bar(range(1, NUM_DRAFTS + 1), shares)
right.bar_label(bars, [f"{share:.0%}" for share in shares])
right.set(title="Acceptance by position", xlabel="position in the round", ylabel="share of rounds", ylim=(0, 1.1))
right.set_xticks(range(1, NUM_DRAFTS + 1))
plt.show()

# %% [markdown]
# ## 6. Is it faster, and is it the same text?
# We answer the same prompts one at a time, with 0 (plain decoding) to K drafts a round. The K take turns, so that a
# disturbance of the machine hits all of them. The first heat compiles, and the fastest of the other three counts. This
# takes a minute or two.
#
# **The pictures:** left, tokens a second for each K. Right, plain decoding beside the best K above 0.

# %%
HEATS = 3


def answer(k):
    """Answer all prompts with k drafts a round. Return the tokens a second and the ids."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, num_speculative_tokens=k)
    before = llm.timing.as_dict()
    ids = [llm.generate(prompt, params, progress=False)[0].outputs[0].token_ids for prompt in prompts]
    now = llm.timing.as_dict()
    spent = sum(now[name] - before[name] for name in ("prefill_seconds", "decode_seconds"))
    return sum(map(len, ids)) / spent, ids


heats = [[answer(k) for k in range(NUM_DRAFTS + 1)] for _ in range(1 + HEATS)]
speeds = [max(heat[k][0] for heat in heats[1:]) for k in range(NUM_DRAFTS + 1)]
same = [all(heat[k][1] == heats[0][0][1] for heat in heats) for k in range(NUM_DRAFTS + 1)]
best = max(range(1, NUM_DRAFTS + 1), key=lambda k: speeds[k])
for k, tokens_per_second in enumerate(speeds):
    print(f"K = {k}: {tokens_per_second:6.1f} tokens/s, {tokens_per_second / speeds[0]:.2f}x, same text: {same[k]}")

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained", width_ratios=(2, 1))
left.plot(range(NUM_DRAFTS + 1), speeds, marker="o")
left.set(title="Speed by K", xlabel="drafts a round (0: plain)", ylabel="tokens a second", ylim=(0, 1.15 * max(speeds)))
left.set_xticks(range(NUM_DRAFTS + 1))
bars = right.bar(["plain", f"K = {best}"], [speeds[0], speeds[best]])
right.bar_label(bars, [f"{speeds[0]:.0f}", f"{speeds[best]:.0f}"])
right.set(title="Plain beside speculative", ylim=(0, 1.15 * max(speeds)))
plt.show()

# %% [markdown]
# In bfloat16, rounding may decide a near-tie between two tokens differently when several tokens are checked at once. In
# float32 (`dtype="float32"`) the text is the same, token for token.
#
# ## 7. Next
# - How it works: [trace_a_round](trace_a_round.ipynb) takes one round apart. It is the best introduction to the code.
# - Your own pair: `LLM("Qwen/Qwen3-8B", speculative_config={"model": "Qwen/Qwen3-0.6B"}, max_model_len=4096)`; both
#   need the same tokenizer. Heads that read the target's hidden states (EAGLE-3, Medusa, MTP, DFlash and others) are
#   given in the same way. `!jaxspec info MODEL --draft DRAFT` reports beforehand whether a pair fits.
# - Which method? [choose_a_drafter](choose_a_drafter.ipynb) puts several side by side.
# - Your own draft: [train_a_drafter](train_a_drafter.ipynb), or `!jaxspec generate-data --help` and
#   `!jaxspec train-draft --help`.
# - Leave `adaptive` out: jaxspec then measures what drafts cost and gain, and chooses K (0 included) for each launch.
# - OpenAI's API over HTTP: `!jaxspec serve MODEL --draft DRAFT` (docs/serving.md).
# - `!jaxspec bench` times every part beside the limits of the device; see `!jaxspec bench --help`.
# - Sampling, seeds, penalties, log-probabilities, several samples a prompt: all work under speculation (docs/).
