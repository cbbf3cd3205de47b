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
# # One round, step by step
#
# A round of speculative decoding has four parts: *propose*, *score*, *verify*, *commit*. jaxspec runs many rounds in
# one device program. Here we take one round out of it and call its parts by hand: the same functions on the same
# arrays. Each section names the source file that it shows, so that you can read both side by side. At the end the
# engine runs the same round and must commit the same tokens.
#
# Sizes: a target of 135 million parameters (a download of 98 MB, once) and its EAGLE-3 head of 15 million, which comes
# with jaxspec. All cells together take one to two minutes on two CPU cores, most of it compiling.
#
# **The stored outputs** are from two CPU cores. On a TPU numbers differ in their last bits. This may change a token
# where a random number is close to its limit. None of these notebooks has been run on a TPU so far.
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
# ## 2. A prompt, read by both models
# Two requests share the engine, so that their pages are interleaved in the pool. We look at the first request, `tea`.
# Pages are tiny (8 tokens) and the pool has only six, so that the whole pool fits into a picture. `kernels="reference"`
# computes in plain `jax.numpy`, and `rejection_sample_method="standard"` selects the textbook rule. In float32 our
# results and the engine's agree almost to the last bit. Loading and compiling take about 15 seconds.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxspec import LLM, SamplingParams

K, PAGE_SIZE, NUM_PAGES = 4, 8, 6
TEMPERATURE, SEED = 0.7, 11  # with this seed the round accepts some drafts and rejects one
PROMPTS = ["To make a cup of tea, you first boil the water", "One, two, three"]

llm = LLM(
    "smollm2-135m-instruct",
    speculative_config={
        "model": "smollm2-135m-eagle3",
        "num_speculative_tokens": K,
        "rejection_sample_method": "standard",
        "adaptive": False,
    },
    dtype="float32",
    kernels="reference",
    max_model_len=NUM_PAGES * PAGE_SIZE - K,
    max_num_seqs=2,
    page_size=PAGE_SIZE,
    num_pages=NUM_PAGES,
    enable_prefix_caching=False,
)
engine, runner = llm.engine, llm.engine.runner
sampling = SamplingParams(temperature=TEMPERATURE, seed=SEED, max_tokens=20)
requests = [engine.add(llm.tokenizer.encode(prompt), sampling, stop_ids=llm.stop_ids) for prompt in PROMPTS]
tea = requests[0]


def words(ids):
    """Return the text of each token, with line ends written as \\n."""
    return [llm.tokenizer.decode([int(i)]).replace("\n", "\\n") for i in ids]


print(len(tea.prompt), "tokens:", " | ".join(words(tea.prompt)))

# %% [markdown]
# A step of the engine (`jaxspec/engine/engine.py`) admits both requests, gives them pages, prefills both caches
# (`jaxspec/decode/prefill.py`) and runs one round. We trace the second round; `grow` makes sure that every row has
# pages for it.
#
# The last token of a row is *pending*: it is part of the text, but no model has read it yet. So the target's cache
# holds one position less than there are tokens.

# %%
engine.step(num_rounds=1)
engine.scheduler.grow(num_rounds=1)
length = tea.num_tokens  # at the start of our round
print("text so far:", repr(llm.tokenizer.decode(tea.tokens)))
print(f"{length} tokens, the target has read {tea.target_len}, the draft {tea.draft_len}")
print("pending:", words(tea.tokens[-1:]))
print("block tables:", [request.pages for request in requests])

# %% [markdown]
# ## 3. The inputs of a launch
# `jaxspec/engine/batch.py` packs requests into arrays, and `jaxspec/decode/state.py` explains each array. From them
# `begin` and `start_state` (`jaxspec/decode/loop.py`) make the state that the loop carries. B is the number of rows, N
# the number of pages in the widest block table.

# %%
from jaxspec.decode.loop import begin, start_state
from jaxspec.decode.round import history_of

plan = engine.launch(requests, K, num_rounds=1)
(inputs,) = jax.tree.map(jnp.asarray, plan.arrays)
config, params, cache = runner.config(plan), runner.params, runner.cache
state = start_state(begin(config, params, inputs))
history = history_of(begin(config, params, inputs), state)
for name in ("num_tokens", "draft_len", "num_wanted", "live", "block_table"):
    print(f"history.{name:<12} {np.asarray(getattr(history, name)).tolist()}")
print(f"the block table's entry {NUM_PAGES} means no page: pages are 0 to {NUM_PAGES - 1}")


def by_itself(part):
    """Compile a part of the round, a pure function, as a program of its own. It does not donate the caches."""
    run = jax.jit(lambda params, inputs, *arrays: part(begin(config, params, inputs), *arrays))
    return lambda *arrays: run(params, inputs, *arrays)


# %% [markdown]
# ## 4. Propose
# `propose` in `jaxspec/decode/round.py` calls the drafter, here `jaxspec/drafters/feature_chain.py`, for K passes of
# the head. Each pass reads the token that the pass before it drew, and a feature vector. For positions that the
# target has read, the features are hidden states of three of its layers; after them, the head's own output takes their
# place. Besides the tokens, `propose` returns q, the distribution that each token was drawn from. (This compiles for a
# few seconds.)

# %%
from jaxspec.decode.round import propose
from jaxspec.verify.standard import at_tokens, q_of_drafts

proposal, cache_after_propose = by_itself(propose)(cache, history)
drafts, q = words(proposal.tokens[0]), np.asarray(proposal.probs[0])
q_drafts = np.asarray(q_of_drafts(proposal)[0])
print("tokens", proposal.tokens.shape, "q", proposal.probs.shape)
for draft, chance in zip(drafts, q_drafts, strict=True):
    print(f"{draft!r:>14}  drawn with q = {chance:.3f}")

# %% [markdown]
# ## 5. Score
# `score` is one pass of the target over K + 1 tokens: the pending one and the drafts. It costs about as much as a pass
# over one token, as long as most of the time goes into reading the weights. `process`
# (`jaxspec/sampling/distribution.py`) applies the temperature, as it did for q. Softmax then gives p: the target's own
# distribution at each place, given the drafts before it. (This compiles for a few seconds.)

# %%
from jaxspec.decode.round import score
from jaxspec.sampling.distribution import process

scores, cache_after_score = by_itself(score)(cache_after_propose, history, proposal)
logits = process(scores.values, inputs.sampling, filters=False)
p = np.asarray(jax.nn.softmax(logits, axis=-1)[0])
print("p", p.shape, "one distribution for each place, sums", p.sum(axis=-1).round(3).tolist())

# %% [markdown]
# **The picture:** at each place, the draft's distribution (q) beside the target's (p), for the most probable tokens.
# The draft token is marked. After the last draft there is only p, for the bonus token.

# %%
BLUE, ORANGE, GREEN, RED, GREY = "#2a7de1", "#f28e2b", "#2e9e5b", "#d1495b", "#c9ced6"
SHOWN = 5


def beside(axes, distributions, title, marked=None, colour_of_mark=ORANGE):
    """Draw bars of the most probable tokens and the marked one. distributions: {label: (probabilities, colour)}."""
    together = np.max([probabilities for probabilities, _ in distributions.values()], axis=0)
    ids = [int(i) for i in np.argsort(-together)[:SHOWN]]
    ids = ids if marked is None or marked in ids else [*ids[:-1], marked]
    height = 0.8 / len(distributions)
    for j, (label, (probabilities, colour)) in enumerate(distributions.items()):
        at = np.arange(len(ids)) + (j + 0.5) * height - 0.4
        axes.barh(at, probabilities[ids], height, color=colour, label=label)
    axes.set_yticks(range(len(ids)), [repr(word)[1:-1].replace(" ", "␣") for word in words(ids)])
    for tick, i in zip(axes.get_yticklabels(), ids, strict=True):
        if i == marked:
            tick.set(color=colour_of_mark, fontweight="bold")
    axes.invert_yaxis()
    axes.set(title=title, xlabel="probability", xlim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)


figure, places = plt.subplots(1, K + 1, figsize=(14, 3.2), layout="constrained")
for i, axes in enumerate(places[:-1]):
    distributions = {"q: draft": (q[i], ORANGE), "p: target": (p[i], BLUE)}
    beside(axes, distributions, f"place {i + 1}: draft '{drafts[i].strip()}'", marked=int(proposal.tokens[0, i]))
beside(places[-1], {"p: target": (p[K], BLUE)}, f"place {K + 1}: bonus token")
places[0].set_ylabel("token (␣ is a space)")
places[0].legend(loc="lower right")
figure.suptitle("Distributions of the next token at each place (the draft token in bold orange)")
plt.show()

# %% [markdown]
# ## 6. Verify
# The rule of rejection sampling (`jaxspec/verify/standard.py`) accepts a draft token x with probability
# min(1, p(x) / q(x)). It draws a uniform number u from the request's seed and the position (`jaxspec/sampling/rng.py`)
# and accepts x where u q(x) < p(x). The first rejection ends the round: the drafts after it followed a token that is
# not in the text, so they are not looked at.

# %%
from jaxspec.sampling.rng import of_seed
from jaxspec.verify import standard
from jaxspec.verify.base import Case

own = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # the argmax tokens, which other rules need
case = Case(logits, own, proposal, of_seed(inputs.sampling.seed), history.num_tokens, inputs.rule_options)
u = np.asarray(case.uniforms()[0])
p_drafts = np.asarray(at_tokens(jnp.asarray(p[None, :-1]), proposal.tokens[:1])[0])
chance = np.minimum(1.0, p_drafts / q_drafts)
verdict = standard.verify(case)
num_accepted = int(verdict.num_accepted[0])
outcomes = ["accepted"] * num_accepted + ["rejected", *["not looked at"] * K][: K - num_accepted]
print(f"{'draft':>14} {'q':>7} {'p':>7} {'min(1, p/q)':>12} {'u':>7}")
for row in zip(drafts, q_drafts, p_drafts, chance, u, outcomes, strict=True):
    print("{!r:>14} {:7.3f} {:7.3f} {:12.3f} {:7.3f}  {}".format(*row))

# %% [markdown]
# **The picture:** a draft token is accepted where its dot (the number u) is inside its bar (the acceptance
# probability).

# %%
colours = {"accepted": GREEN, "rejected": RED, "not looked at": GREY}
figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
axes.bar(range(K), chance, color=[colours[outcome] for outcome in outcomes], alpha=0.55, width=0.6)
axes.scatter(range(K), u, color="black", zorder=3, label="u, the number drawn")
for i, outcome in enumerate(outcomes):
    axes.text(i, 1.03, outcome, ha="center", color=colours[outcome] if outcome != "not looked at" else "grey")
axes.set_xticks(range(K), [f"{i + 1}: '{draft.strip()}'" for i, draft in enumerate(drafts)])
axes.set(title="Which drafts are accepted", xlabel="draft", ylabel="min(1, p / q)", ylim=(0, 1.15))
axes.spines[["top", "right"]].set_visible(False)
axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
plt.show()

# %% [markdown]
# Each round yields its accepted drafts and one extra token. Where a draft was rejected, the extra token replaces it. It
# is drawn from the residual max(p - q, 0), normalised (`residual_distribution`), and this makes the output follow the
# target's distribution exactly. Where all drafts were accepted, the extra token is the bonus token, drawn from p.
#
# **The picture:** at the place of the rejected draft, the green bars are the distribution of the token that replaces
# it. The token that was drawn is marked.

# %%
extra_law = np.asarray(
    standard.residual_distribution(jax.nn.softmax(logits, axis=-1), proposal, verdict.num_accepted)[0]
)
extra = int(verdict.next_token[0])
rejected = num_accepted < K
distributions = {"q: draft": (q[num_accepted], ORANGE)} if rejected else {}
distributions |= {"p: target": (p[num_accepted], BLUE), "the extra token": (extra_law, GREEN)}
figure, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
what = f"replaces '{drafts[num_accepted].strip()}'" if rejected else "is the bonus token"
beside(axes, distributions, f"Place {num_accepted + 1}: '{words([extra])[0].strip()}' {what}", extra, GREEN)
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# ## 7. Commit
# `verify` of `jaxspec/decode/round.py` applies to each row its own rule, so its verdict must equal ours. `commit` then
# appends the accepted drafts and the extra token, and sets the new lengths. It moves no keys and values. Those of
# rejected drafts stay in their slots beyond the row's length: they are never read, and later rounds overwrite them.
# This lowering of lengths is the whole rollback.

# %%
from jaxspec.decode.round import commit, verify

verdict, ending = by_itself(verify)(history, proposal, scores)
assert (int(verdict.num_accepted[0]), int(verdict.next_token[0])) == (num_accepted, extra)
after = by_itself(commit)(state, history, proposal, scores, verdict, ending)
gained = lambda row: after.tokens[row, state.num_tokens[row] : after.num_tokens[row]]
by_hand = [np.asarray(gained(row)).tolist() for row in range(len(requests))]
print("before:", repr(llm.tokenizer.decode(tea.tokens)))
print("gained:", " | ".join(words(by_hand[0])), f"({num_accepted} drafts and one token more)")
print(f"tokens: {length} -> {after.num_tokens[0]}; the draft has read: {tea.draft_len} -> {after.draft_len[0]}")

# %% [markdown]
# **The picture:** the target's pages before and after, with one line for each page and one box for each slot. A box is
# coloured where the slot was written. Red slots were written for drafts that were rejected or followed a rejected one;
# they are never read. The pending token has a slot (dashed). Its keys and values are written there in the next round.


# %%
VALID, STALE = "#bcd6f7", "#f3b8bf"


def draw_pages(axes, cache, tokens, num_tokens, title):
    """Draw the pool. tokens: those in the slots of `tea`, by position; num_tokens: the length of its text."""
    written = np.abs(np.asarray(cache.target[0].pages)).sum(axis=(2, 3)) > 0
    place_of = {page: i for i, page in enumerate(tea.pages)}
    for page, slot in np.ndindex(NUM_PAGES, PAGE_SIZE):
        mine, position = page in place_of, place_of.get(page, 0) * PAGE_SIZE + slot
        pending = mine and position == num_tokens - 1
        look = {"facecolor": "white", "edgecolor": GREY, "linewidth": 1.4}
        if written[page, slot]:
            look["facecolor"] = GREY if not mine else VALID if position < num_tokens - 1 else STALE
        if pending:
            look |= {"edgecolor": BLUE, "linestyle": "--"}
        axes.add_patch(plt.Rectangle((slot, page), 0.94, 0.86, **look))
        if mine and (written[page, slot] or pending) and position < len(tokens):
            axes.text(slot + 0.47, page + 0.43, tokens[position].strip(), ha="center", va="center", fontsize=8)
    labels = [f"{page}" + (f": tea's {place_of[page] + 1}." if page in place_of else "") for page in range(NUM_PAGES)]
    axes.set_yticks(np.arange(NUM_PAGES) + 0.43, labels)
    axes.set_xticks(np.arange(PAGE_SIZE) + 0.47, range(PAGE_SIZE))
    axes.set(title=title, xlabel="slot", ylabel="page", xlim=(-0.1, PAGE_SIZE), ylim=(NUM_PAGES, -0.1))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


figure, (left, right) = plt.subplots(1, 2, figsize=(15, 4.2), layout="constrained")
draw_pages(left, cache, words(tea.tokens), length, f"Before: {length} tokens, block table {tea.pages}")
final = int(after.num_tokens[0])
# The tokens whose keys and values are in the slots. Rejected drafts among them are not part of the text.
held = [*tea.tokens, *np.asarray(proposal.tokens[0]).tolist()]
held[final - 1] = by_hand[0][-1]
draw_pages(right, cache_after_score, words(held), final, f"After: {final} tokens, same pages, nothing was moved")
box = lambda face, edge=GREY, line="-": plt.Rectangle((0, 0), 1, 1, facecolor=face, edgecolor=edge, linestyle=line)
meanings = {"tea, valid": box(VALID), "left over, never read": box(STALE), "the other request": box(GREY)}
meanings |= {"pending": box("white", BLUE, "--"), "empty": box("white")}
figure.legend(meanings.values(), meanings.keys(), loc="outside lower center", ncols=len(meanings), frameon=False)
plt.show()

# %% [markdown]
# ## 8. The engine's own round
# Now the engine runs the same launch as one compiled program: `round` of `jaxspec/decode/round.py` inside the
# `while_loop` of `jaxspec/decode/loop.py`. The random numbers depend on the seed and the position alone, so the engine
# must commit the same tokens.

# %%
from jaxspec.engine.runner import fetch

result = fetch(runner.start(plan))
by_engine = [result.new_tokens[row, : result.num_new[row]].tolist() for row in range(len(requests))]
for mine, its in zip(by_hand, by_engine, strict=True):
    print(f"by hand {words(mine)}, by the engine {words(its)}: {'the same' if mine == its else 'NOT THE SAME'}")
assert by_hand == by_engine
ours, engines = jax.tree.leaves(cache_after_score.target), jax.tree.leaves(runner.cache.target)
gap = max(float(jnp.abs(a - b).max()) for a, b in zip(ours, engines, strict=True))
print(f"largest difference between our pages and the engine's: {gap:.1e}")

engine.apply_result(requests, result)  # give the engine the result, then let it finish both requests
while engine.busy:
    engine.step()
print("and the whole text:", repr(llm.tokenizer.decode(tea.tokens)))

# %% [markdown]
# ## 9. Round after round
# The engine now answers the first prompt once more, alone and one round a step. With the same seed it writes the same
# text.
#
# **The picture:** one line for each round. Green boxes are accepted drafts and the blue box is the extra token. Empty
# boxes are drafts that were rejected or not looked at. Read line by line, the words are the text. The last round is
# left out, because the limit of 20 tokens may end it early.

# %%
import itertools

again = engine.add(tea.prompt, sampling, stop_ids=llm.stop_ids)
lengths = [again.num_tokens]
while engine.busy:
    engine.step(num_rounds=1)
    lengths.append(again.num_tokens)
rounds = [words(again.tokens[start:end]) for start, end in itertools.pairwise(lengths[:-1])]

figure, axes = plt.subplots(figsize=(9, 0.42 * len(rounds) + 1), layout="constrained")
for row, gained in enumerate(rounds):
    for place in range(K + 1):
        last = place == len(gained) - 1
        look = {"facecolor": "white" if place >= len(gained) else VALID if last else "#bfe3cc", "edgecolor": GREY}
        axes.add_patch(plt.Rectangle((place, row), 0.95, 0.86, **look))
        if place < len(gained):
            axes.text(place + 0.47, row + 0.45, gained[place].strip(), ha="center", va="center", fontsize=9)
axes.set_yticks(np.arange(len(rounds)) + 0.43, [str(row + 1) for row in range(len(rounds))])
axes.set_xticks(np.arange(K + 1) + 0.47, [str(place + 1) for place in range(K + 1)])
mean = sum(map(len, rounds)) / len(rounds)
axes.set(title=f"{len(rounds)} rounds, on average {mean:.1f} tokens", xlabel="place in the round", ylabel="round")
axes.set(xlim=(-0.05, K + 1), ylim=(len(rounds), -0.1))
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plt.show()
print("round by round:", " / ".join("".join(gained) for gained in rounds))
print("the same text:", again.tokens == tea.tokens)

# %% [markdown]
# ## 10. Next
# - Change `SEED`, `TEMPERATURE` or the prompt, and run all cells again: some rounds accept all drafts, some none.
# - Read `jaxspec/decode/round.py` from top to bottom: you have seen every function that a chain of drafts needs.
# - By default a request with a seed uses the *coupled* rule, and one without a seed *block* verification
#   (docs/sampling.md). Each rule is a file beside `jaxspec/verify/standard.py`; the round is the same.
# - [quickstart](quickstart.ipynb) generates text, [train_a_drafter](train_a_drafter.ipynb) trains the draft that
#   proposes, [choose_a_drafter](choose_a_drafter.ipynb) compares methods.
