# %% [markdown]
# # 07 · Drafts, and how to teach one
#
# *30 minutes, of which 25 seconds are training. You need: 03 and 04.*
#
# **Goals.** You can see how the gain collapses with a draft that does not know its target; teach a draft with nothing but the target's own
# samples; say which loss acceptance really hangs on; and choose among drafts.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import minispec
from minispec import GPT, Sampling, planner
from minispec.pair import read_config, weights_folder
from minispec.teach import check, compare, device, prompts, source, style
from minispec.train import distillation
from minispec.train.curves import stages
from minispec.train.recipe import Recipe

style()
pair = minispec.load_pair(device=device())
target, good, tokenizer = pair.target, pair.draft, pair.tokenizer
poor = minispec.load_pair(device=device(), draft="misaligned").draft

# %% [markdown]
# ## Predict first
# The *misaligned* draft knows how often each word occurs, and nothing about grammar or plot. How many tokens does a target pass yield with it
# (K = 4)? The well-taught draft gives more than 3.

# %%
my_guess = ...  # tokens a pass


# %%
def tokens_a_pass(draft, rows=6, temperature=1.0):
    """Tokens a target pass over some prompts, K = 4, and acceptance (accepted / tested)."""
    options = {"max_new_tokens": 32, "draft_len": 4, "sampling": Sampling(temperature), "stop": (), "seed": 0}
    stats = [run.stats for run in minispec.speculate(target, draft, prompts(pair, rows), **options)]
    tested = sum(s.tested for s in stats)
    return sum(s.new_tokens for s in stats) / sum(s.target_passes for s in stats), sum(
        s.accepted for s in stats
    ) / tested


results = {"misaligned": tokens_a_pass(poor), "distilled": tokens_a_pass(good)}
for name, (yielded, rate) in results.items():
    print(f"{name:11}: {yielded:.2f} tokens a pass, acceptance {rate:.2f}")
compare("tokens a pass, misaligned", my_guess, results["misaligned"][0])

# %% [markdown]
# The text is the target's own in both cases. A bad draft never harms the text, only the speed.
#
# ## Which number must fall?
# Acceptance is 1 - TV(p, q). What one usually minimises is the Kullback-Leibler divergence of p from q: its gradient is strong everywhere, also
# where the draft is still hopeless.
#
# ### Exercise 1
# Write the forward KL divergence.


# %% exercise 07.forward_kl
def my_forward_kl(p, q):
    """KL(p || q) = sum p log(p / q), in nats: (V,), (V,) -> a number."""
    ...


# %% solution 07.forward_kl
def my_forward_kl(p, q):
    """KL(p || q) = sum p log(p / q), in nats: (V,), (V,) -> a number."""
    return float((p * (p / q).log()).sum())


# %%
check("07.forward_kl", my_forward_kl)

# %% [markdown]
# KL and TV are not the same. Here the target has two likely regions, and the draft is a model too small to copy it: it can only place *one* hump,
# anywhere and of any width. **Predict:** where does each loss put the hump?

# %%
x = torch.arange(24, dtype=torch.float64)


def hump(centre, width):
    return (-0.5 * ((x - centre) / width) ** 2).softmax(0)


p = 0.62 * hump(7, 1.5) + 0.38 * hump(16, 1.8)
drafts = [hump(c / 2, w / 4) for c in range(47) for w in range(5, 40)]  # all that this draft could be
losses = {
    "KL(p || q)": lambda q: (p * (p / q).log()).sum(),
    "KL(q || p)": lambda q: (q * (q / p).log()).sum(),
    "TV(p, q)": lambda q: 0.5 * (p - q).abs().sum(),
}
fig, ax = plt.subplots()
ax.bar(x, p, 0.9, color="lightgrey", label="p (target)")
for name, loss in losses.items():
    best = min(drafts, key=lambda q: float(loss(q)))
    ax.plot(x, best, label=f"lowest {name}: acceptance {float(torch.minimum(p, best).sum()):.2f}")
ax.set(xlabel="token", ylabel="probability", title="A draft too small to be right", ylim=(0, 0.3))
ax.legend(loc="upper right", fontsize=11)
plt.show()

# %% [markdown]
# A model too small to copy its target must choose what to get wrong: forward KL covers everything, reverse KL plays safe, and TV is the rejection rate itself. Its gradient
# is useless while the draft is far off, though. In practice: forward KL first, TV to finish.
#
# ## Teach one, live
# Training data: what the *target itself* says. No corpus is needed, and the draft sees just the kind of text it will draft for.

# %%
runs = minispec.generate(target, prompts(pair), max_new_tokens=90, stop=(), seed=0)
own = torch.tensor([(run.prompt + run.tokens)[:96] for run in runs], device=target.device)  # (24, 96)
held_out, train = own[:4], own[4:].split(4)
print(f"{sum(b.numel() for b in train)} tokens, e.g. {tokenizer.decode(own[5, :40].tolist())!r}")

# %% [markdown]
# The student: a model of the shipped draft's shape with random weights. Training is a loop over "both read the same text, move q towards p":

# %%
source(distillation.distil)

# %% [markdown]
# **Predict:** how far does its acceptance get in 15 seconds of training, from next to nothing?

# %%
torch.manual_seed(0)
student = GPT(good.config).to(target.device)
untaught = tokens_a_pass(student)


recipe = Recipe(minutes=15 / 60, batch=4, context=96, lr=3e-3, warmup=20, decay=0.5, validate_every=40)
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the target's laws, computed once and kept
    batches = distillation.kept_batches(target, lambda step: train[step], 4 * len(train), 4, recipe, Path(folder))
    state = distillation.distil(
        target,
        student,
        batches,
        recipe,
        loss="fkl+tv",
        validate=lambda draft: distillation.measure(target, draft, held_out),
    )
student.requires_grad_(False)
results = {"untaught": untaught} | results
results["taught live"] = tokens_a_pass(student)
order = ("untaught", "misaligned", "taught live", "distilled")
print(f"{state.step} steps, {state.step * 4 * 96} tokens read, {state.seconds:.0f} s")

# %%
fig, axes = plt.subplots(1, 2, figsize=(10.5, 4))
for name in ("acceptance", "agreement"):
    seconds = [h["seconds"] for h in state.history]
    axes[0].plot(seconds, [h[name] for h in state.history], "o-", markersize=4, label=name)
axes[0].set(xlabel="seconds of training", ylabel="on samples not trained on", title="Live", ylim=(0, 1))
axes[0].legend()
bars = axes[1].bar(range(4), [results[name][0] for name in order], color=["grey", "C1", "C2", "C0"])
axes[1].bar_label(bars, [f"{results[name][0]:.2f}" for name in order])
axes[1].set_xticks(range(4), order, rotation=15, fontsize=11)
axes[1].set(ylabel="tokens a pass, K = 4", title="What it is worth", ylim=(0, 5))
plt.show()

# %% [markdown]
# (*acceptance*: mean of sum min(p, q), for sampling. *agreement*: how often both find the same token likeliest, for temperature 0.)
#
# The first seconds teach the common words, which is all that the misaligned draft knows; the rest takes patience. How the shipped draft was
# taught stands in `weights/config.json`:

# %%
fig, ax = plt.subplots()
minutes = 0.0
for name, curve in stages(read_config(weights_folder())):
    points = [(minutes + h["seconds"] / 60, h["acceptance"]) for h in curve if "acceptance" in h]
    if points and name.startswith("draft"):
        ax.plot(*zip(*points, strict=True), "o-", markersize=4, label=name.removeprefix("draft: "))
        minutes = points[-1][0]
ax.set(
    xlabel="minutes of training, one stage after the other",
    ylabel="acceptance",
    title="How the shipped draft was taught",
)
ax.legend(fontsize=10)
plt.show()

# %% [markdown]
# To go on at home: `minispec distill --data self --fresh --minutes 5` does the same for longer, with fresh samples.
#
# ## Which draft to take?
# A larger draft guesses better and costs more.
#
# ### Exercise 2
# `drafts` maps a name to (acceptance a, cost c of a draft step in target passes). Return the name of the fastest, each draft at the K that suits it
# best. Speed-up = (1 - a^(K+1)) / (1 - a) / (1 + K c); `planner.best_draft_len(a, c)` gives the best K and its speed-up.


# %% exercise 07.best_draft
def my_best_draft(drafts):
    """The name of the draft with the largest speed-up."""
    ...


# %% solution 07.best_draft
def my_best_draft(drafts):
    """The name of the draft with the largest speed-up."""
    return max(drafts, key=lambda name: planner.best_draft_len(*drafts[name])[1])


# %%
check("07.best_draft", my_best_draft)

# %%
fig, ax = plt.subplots()
costs = torch.linspace(0.01, 0.5, 50)
for a in (0.9, 0.8, 0.6, 0.4):
    ax.plot(costs, [planner.best_draft_len(a, float(c))[1] for c in costs], label=f"a = {a}")
ax.axhline(1, color="grey", linewidth=1)
ax.set(xlabel="cost of a draft step c, in target passes", ylabel="speed-up at the best K", title="Good or cheap?")
ax.legend()
plt.show()

# %% [markdown]
# ## Summary
# - Any draft is safe; only an aligned one is fast. Alignment is with *this target*, not with the truth.
# - Acceptance = 1 - TV(p, q). Forward KL teaches a hopeless draft, TV finishes a good one.
# - The target's own samples are training data enough.
# - Choose the draft with the largest speed-up, not the largest acceptance.
#
# **Papers.** DistillSpec [2310.08461](https://arxiv.org/abs/2310.08461); Leviathan et al. [2211.17192](https://arxiv.org/abs/2211.17192);
# Online speculative decoding [2310.07177](https://arxiv.org/abs/2310.07177).
