# %% [markdown]
# # 08 · Beyond: better rules, other drafts, many rows
#
# *40 minutes. You need: 03 and 04. The parts are independent of each other: take those that you like.*
#
# **Goals.** You know what can be gained beyond the token rule and a fixed chain, what each gain costs, and where it ends.

# %%
import matplotlib.pyplot as plt
import torch

import minispec
from minispec import EarlyExitDrafter, NGramDrafter, Sampling, Tree, planner, stopwatch, verify
from minispec.advanced import AdaptiveDrafter, HeuristicDrafter, traversal
from minispec.teach import check, compare, device, prompts, source, style

style()
pair = minispec.load_pair(device=device())
target, draft, tokenizer = pair.target, pair.draft, pair.tokenizer
texts = prompts(pair, 6)


def tokens_a_pass(drafter, seeds=(0,), new=48, sampling=None, **options):
    """Tokens a target pass over six prompts, with each seed."""
    options |= {"max_new_tokens": new, "sampling": sampling or Sampling(), "stop": ()}
    stats = [run.stats for seed in seeds for run in minispec.speculate(target, drafter, texts, seed=seed, **options)]
    return sum(s.new_tokens for s in stats) / sum(s.target_passes for s in stats)


# %% [markdown]
# ## Block verification: a surplus repays a deficit
# The token rule tests each guess alone: min(1, r_1) min(1, r_2) ... with r_i = p(x_i) / q(x_i). If r_1 = 0.5 and r_2 = 2, the two guesses *together* are
# as likely under p as under q, yet the token rule keeps both only every second time. Block verification carries a running weight w over the block.
#
# ### Exercise 1
# w_0 = 1, and w_i = min(1, w_{i-1} r_i). Write w_1 ... w_K.


# %% exercise 08.block_weights
def my_weights(ratios):
    """[w_1, ..., w_K] from the ratios p(x_i) / q(x_i)."""
    ...


# %% solution 08.block_weights
def my_weights(ratios):
    """[w_1, ..., w_K] from the ratios p(x_i) / q(x_i)."""
    w, weights = 1.0, []
    for r in ratios:
        w = min(1.0, w * r)
        weights.append(w)
    return weights


# %%
check("08.block_weights", my_weights)

# %% [markdown]
# **Predict:** how much more does block verification accept at K = 2, and how much at K = 10?

# %%
my_guess = ...  # gain at K = 10, in percent

# %%
lengths = (2, 5, 10)
yields = {
    rule: [tokens_a_pass(draft, range(6), draft_len=k, rule=rule) for k in lengths] for rule in ("token", "block")
}
fig, ax = plt.subplots()
for rule, values in yields.items():
    ax.plot(lengths, values, "o-", label=rule)
ax.set(xlabel="guesses K", ylabel="tokens a pass", title="The same guesses, two rules, T = 1", ylim=(0, None))
ax.legend()
plt.show()
compare("gain at K = 10", my_guess, 100 * (yields["block"][-1] / yields["token"][-1] - 1), " %")

# %% [markdown]
# No rule that sees one chain can accept more on average. On trees the same idea is *traversal verification*; on a chain they are one.

# %%
source(verify.block)

# %%
tree = Tree.branching([2, 2, 1, 1])
for rule in ("rrs", "traversal"):
    print(
        f"{rule:10}: {tokens_a_pass(draft, range(3), new=32, tree=tree, rule=rule):.2f} tokens a pass with branching [2, 2, 1, 1]"
    )
print(traversal.__doc__.splitlines()[0])

# %% [markdown]
# ## Coupled noise: same seed, same tokens
# Draw the target's token at position i by noise that hangs on (seed, i) alone, and let the draft use the *same noise*: then both often choose the
# same token, and the output cannot depend on the draft at all. Three drafts, one seed, and plain decoding:

# %%
options = {"max_new_tokens": 24, "seed": 11, "stop": ()}
outputs = {
    "plain": minispec.generate(target, texts[2], **options),
    "draft, chain 5": minispec.speculate(target, draft, texts[2], draft_len=5, rule="coupled", **options),
    "draft, a tree": minispec.speculate(
        target, draft, texts[2], tree=Tree.branching([2, 2]), rule="coupled", **options
    ),
    "3 layers, chain 3": minispec.speculate(
        target,
        EarlyExitDrafter(target, layers=3, tree=Tree.chain(3), how="coupled"),
        texts[2],
        rule="coupled",
        **options,
    ),
}
for name, run in outputs.items():
    print(f"{name:18} {run.stats.target_passes:2} passes: {tokenizer.decode(run.tokens)!r}")

# %% [markdown]
# Handy for debugging and for reproducible services: change the draft, and not one token changes. It accepts a little less often than the token rule.
#
# ## No draft model at all
# **Prompt lookup.** What followed the last time these words stood here?
#
# ### Exercise 2


# %% exercise 08.lookup
def my_lookup(text, n, K):
    """What followed the latest *earlier* place where the last n tokens of the text stand: up to K tokens, or []."""
    ...


# %% solution 08.lookup
def my_lookup(text, n, K):
    """What followed the latest *earlier* place where the last n tokens of the text stand: up to K tokens, or []."""
    for start in range(len(text) - n - 1, -1, -1):
        if text[start : start + n] == text[-n:]:
            return text[start + n : start + n + K]
    return []


# %%
check("08.lookup", my_lookup)

# %% [markdown]
# **Early exit.** The target's own first layers and its head make a draft without new weights. (Untrained exits guess poorly, and three of eight layers
# are an expensive draft.) Greedy decoding, all checked by `match`:

# %%
greedy = Sampling(0.0)
without_model = {
    "draft model": tokens_a_pass(draft, draft_len=4, sampling=greedy, new=40),
    "prompt lookup": tokens_a_pass(NGramDrafter(4), sampling=greedy, new=40),
    "early exit, 3 of 8": tokens_a_pass(EarlyExitDrafter(target, 3, Tree.chain(4), "top-k"), sampling=greedy, new=40),
}
fig, ax = plt.subplots(figsize=(8, 2.8))
bars = ax.barh(list(without_model), list(without_model.values()), color=["C0", "C1", "C2"])
ax.bar_label(bars, [f" {v:.2f}" for v in without_model.values()])
ax.set(xlabel="tokens a pass, T = 0, K = 4", xlim=(0, 5))
ax.invert_yaxis()
plt.show()

# %% [markdown]
# ## Adaptive length: stop when unsure
# Where the draft is unsure, more guesses are wasted. But *when* may one stop? A guess x comes from q; a rule decides whether it is submitted for testing.
#
# - **A**: draw x. If q(x) < 0.1, throw it away and let the target draw the bonus token here.
# - **B**: before drawing, stop if max q < 0.1.
# - **C**: draft fewer tokens if the *last* step accepted few.
# - **D**: draw x and submit it. If q(x) < 0.1, do not draw any further.
#
# ### Exercise 3
# Which leave the target's law untouched?

# %% exercise 08.stopping
my_answer = {"A": ..., "B": ..., "C": ..., "D": ...}  # True: exact, False: not

# %% solution 08.stopping
my_answer = {"A": False, "B": True, "C": True, "D": True}  # True: exact, False: not

# %%
check("08.stopping", my_answer)

# %%
drafters = {
    "chain of 8": minispec.ModelDrafter(draft, Tree.chain(8)),
    "two more / one less (C)": HeuristicDrafter(draft, max_len=8),
    "stop when unsure (B)": AdaptiveDrafter(draft, max_len=8, cost=0.03),
}
for name, drafter in drafters.items():
    runs = [r.stats for r in minispec.speculate(target, drafter, texts, max_new_tokens=48, stop=(), seed=0)]
    drafted = sum(s.proposed for s in runs) / sum(s.target_passes for s in runs)
    yielded = sum(s.new_tokens for s in runs) / sum(s.target_passes for s in runs)
    print(f"{name:24}: {drafted:.1f} guesses and {yielded:.2f} tokens a pass")

# %% [markdown]
# ## Batches, and why the gain shrinks
# With B rows a plain pass reads B tokens anyway: the weights are used B times for each reading. The check of B rows reads B (K + 1) tokens.
#
# ### Exercise 4
# `times(n)` is the time of a target pass over n tokens in all, `draft_step` that of a draft pass over the batch. What is the speed-up?


# %% exercise 08.batch_gain
def my_batch_gain(expected, times, B, K, draft_step):
    """Speed-up over plain decoding of the same batch; `expected` tokens a step for each row."""
    ...


# %% solution 08.batch_gain
def my_batch_gain(expected, times, B, K, draft_step):
    """Speed-up over plain decoding of the same batch; `expected` tokens a step for each row."""
    return expected * times(B) / (times(B * (K + 1)) + K * draft_step)


# %%
check("08.batch_gain", my_batch_gain)

# %% [markdown]
# **Predict:** from which batch size on does speculation with K = 4 no longer pay on this machine? First t(n), then the formula:

# %%
sizes = (1, 2, 4, 8, 16, 24, 40, 64, 96)
ids = torch.zeros(96, 1, dtype=torch.long, device=target.device)
times = {}
with torch.inference_mode():
    for n in sizes:
        cache = minispec.KVCache(target.config, batch=n, capacity=8, device=target.device)

        def one_pass(n=n, cache=cache):
            cache.rollback(0)
            target(ids[:n], cache)

        one_pass()
        times[n] = min(stopwatch.seconds(one_pass, target.device) for _ in range(3))
costs = planner.Costs(times, draft_step=0.0)
expected = planner.expected_tokens(0.8, 4)
batches = (1, 2, 4, 6, 8, 12, 16)
gains = [expected * costs.check(B) / (costs.check(5 * B) + 4 * 0.05 * costs.check(B)) for B in batches]
fig, axes = plt.subplots(1, 2, figsize=(10, 3.8))
axes[0].plot(sizes, [1e3 * times[n] for n in sizes], "o-")
axes[0].set(xlabel="tokens in the pass", ylabel="milliseconds", title="t(n)", ylim=(0, None))
axes[1].plot(batches, gains, "o-", color="C1")
axes[1].axhline(1, color="grey", linewidth=1)
axes[1].set(xlabel="rows B", ylabel="speed-up", title="Predicted, a = 0.8, K = 4, c = 0.05", ylim=(0, None))
plt.show()

# %% [markdown]
# Servers with many users at once have no idle arithmetic to spend. Speculation is for latency: few rows, large models, idle processors, like yours.
#
# ## Summary
# - `block` (chains) and `traversal` (trees) accept more with the same guesses, most at large K and T near 1.
# - `coupled` makes the output independent of the draft, token for token.
# - N-grams and early exits need no draft model; whether they pay depends on the text.
# - Decide on submitting a guess before it is drawn.
# - The gain lives on idle arithmetic, and a batch uses it up.
#
# **Papers.** Block verification [2403.10444](https://arxiv.org/abs/2403.10444); traversal [2505.12398](https://arxiv.org/abs/2505.12398); coupling
# [2408.07978](https://arxiv.org/abs/2408.07978); Draft & Verify [2309.08168](https://arxiv.org/abs/2309.08168); SpecDec++
# [2405.19715](https://arxiv.org/abs/2405.19715); BASS [2404.15778](https://arxiv.org/abs/2404.15778).
