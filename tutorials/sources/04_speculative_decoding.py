# %% [markdown]
# # 04 · Speculative decoding
#
# *35 minutes. You need: 01 to 03.*
#
# **Goals.** You can write the loop yourself in about thirty lines; say how many tokens a step yields, and when it pays; and compare
# a prediction with a measurement.
#
# ```
# pending    draft proposes K guesses (q)      target scores all K + 1 places at once (p)
#  "son" →   " to"   " him"   ","   " and"     accept x with min(1, p(x) / q(x))
#              ✓       ✓      ✗                first rejection: draw from norm((p - q)+) instead
# emitted:   " to"   " him"  " and"            all accepted: one bonus token from p
# ```

# %%
import matplotlib.pyplot as plt

import minispec
from minispec import Sampling, Tree, planner, stopwatch
from minispec.teach import Dice, check, compare, device, laws, prompts, source, style

style()
pair = minispec.load_pair(device=device())
target, draft, tokenizer = pair.target, pair.draft, pair.tokenizer

# %% [markdown]
# ## Predict first
# Each guess stands with probability 0.8, K = 4 guesses a step. How many tokens does a target pass yield on average?

# %%
my_guess = ...  # between 1 and 5

# %% [markdown]
# ## Watch it
# One line is one target pass: what the draft guessed, and what came out of it.

# %%
prompt = prompts(pair, 2)[1]
print(tokenizer.decode(prompt))
for step in minispec.stream(target, draft, prompt, max_new_tokens=32, draft_len=4, seed=3):
    guessed = [tokenizer.decode([x]) for x in step.drafted]
    out = [tokenizer.decode([x]) for x in step.tokens]
    print(f"{step.accepted} of {step.proposed} stand   {guessed!s:50.50} -> {out}")

# %% [markdown]
# ## Write it
# Models are functions here: `target(tokens)` gives the law of the next token after **each** of the tokens, a tensor (T, V); row
# `[-1]` is what comes next. (No cache: it reads everything again each time. The package does it properly.)
#
# ### Exercise 1
# Write the loop. A step has four parts:
# 1. **draft**: K times, append a token drawn from `draft(...)[-1]`, and remember each law q;
# 2. **score**: *one* call of `target` on everything; the laws for the K guesses and the bonus are its last K + 1 rows;
# 3. **verify**: accept guesses with the coin of notebook 03 until one falls; then draw from the residual, or if none fell the bonus;
# 4. **commit**: append what stands.
#
# `minispec.verify.residual(p, q)` is the residual of notebook 03. The check enumerates every outcome of your loop, so it takes a few
# seconds.


# %% exercise 04.loop
def my_speculate(target, draft, prompt, max_new_tokens, K, dice):
    """New token ids, exactly max_new_tokens of them, that follow the target's law."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        # 1. draft
        # 2. score
        # 3. verify
        # 4. commit
        return None  # take this line out when you begin
    return tokens[len(prompt) : len(prompt) + max_new_tokens]


# %% solution 04.loop
def my_speculate(target, draft, prompt, max_new_tokens, K, dice):
    """New token ids, exactly max_new_tokens of them, that follow the target's law."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        drafted, q = [], []
        for _ in range(K):  # 1. draft
            q.append(draft(tokens + drafted)[-1])
            drafted.append(dice.pick(q[-1]))
        p = target(tokens + drafted)[len(tokens) - 1 :]  # 2. score: (K+1, V)
        for i, x in enumerate(drafted):  # 3. verify, 4. commit
            if dice.flip(min(1.0, float(p[i][x] / q[i][x]))):
                tokens.append(x)
            else:
                tokens.append(dice.pick(minispec.verify.residual(p[i], q[i])))
                break
        else:
            tokens.append(dice.pick(p[K]))  # all stand: the bonus
    return tokens[len(prompt) : len(prompt) + max_new_tokens]


# %%
check("04.loop", my_speculate)

# %% [markdown]
# Your loop on the real pair, every call of the target counted:

# %%
calls = 0


def counted(tokens):
    global calls
    calls += 1
    return laws(target, tokens)


mine = my_speculate(counted, lambda tokens: laws(draft, tokens), prompt, 24, 4, Dice(0))
if mine is not None:
    print(f"{calls} target passes for {len(mine)} tokens:", tokenizer.decode(prompt + mine))

# %% [markdown]
# ## The package's loop
# One loop serves chains and trees, greedy and sampling, one row and many. Find your four parts in it.

# %%
source(minispec.decode.decode, docstring=False)

# %% [markdown]
# ## How many tokens does a step yield?
# Let each guess stand with probability a, given that those before it stand.
#
# ### Exercise 2
# Write the expected number of tokens of a step with K guesses. (What is it for a = 0? For a = 1?)


# %% exercise 04.expected_tokens
def my_expected_tokens(a, K):
    """Expected tokens a step: accepted guesses and the one that the target adds."""
    ...


# %% solution 04.expected_tokens
def my_expected_tokens(a, K):
    """Expected tokens a step: accepted guesses and the one that the target adds."""
    return (1 - a ** (K + 1)) / (1 - a) if a < 1 else K + 1


# %%
check("04.expected_tokens", my_expected_tokens)

# %%
compare("tokens a pass at a = 0.8, K = 4", my_guess, planner.expected_tokens(0.8, 4))
fig, ax = plt.subplots()
for a in (0.5, 0.7, 0.8, 0.9):
    ax.plot(range(17), [planner.expected_tokens(a, k) for k in range(17)], "o-", markersize=5, label=f"a = {a}")
    ax.axhline(1 / (1 - a), color="grey", linewidth=1, linestyle=":")
ax.set(xlabel="guesses K", ylabel="tokens a step", title="(1 - a^(K+1)) / (1 - a); dotted: its limit 1 / (1 - a)")
ax.legend()
plt.show()

# %% [markdown]
# ## When does it pay?
# Time is counted in plain target passes, t(1) = 1. A draft step costs c; the check of K + 1 places costs t(K+1) / t(1), which notebook
# 01 measured.
#
# ### Exercise 3
# Write the speed-up over plain decoding.


# %% exercise 04.speed_up
def my_speed_up(a, K, c, check=1.0):
    """Gain over plain decoding. a: acceptance, c: cost of a draft step, check: t(K+1) / t(1)."""
    ...


# %% solution 04.speed_up
def my_speed_up(a, K, c, check=1.0):
    """Gain over plain decoding. a: acceptance, c: cost of a draft step, check: t(K+1) / t(1)."""
    return planner.expected_tokens(a, K) / (check + K * c)


# %%
check("04.speed_up", my_speed_up)

# %%
fig, ax = plt.subplots()
for c in (0.02, 0.1, 0.3):
    gains = [planner.speed_up(0.8, k, c) for k in range(17)]
    best, gain = planner.best_draft_len(0.8, c)
    ax.plot(range(17), gains, "-", label=f"c = {c}: best K = {best}")
    ax.plot([best], [gain], "ko")
ax.axhline(1, color="grey", linewidth=1)
ax.set(xlabel="guesses K", ylabel="speed-up", title="a = 0.8: more guesses are not always better")
ax.set_ylim(0.7, 5.2)
ax.legend()
plt.show()

# %% [markdown]
# The rule behind the maximum: add a guess while (chance that it is reached and accepted) is at least (speed-up so far) x (its cost).
#
# ## Predicted and measured
# First the costs of this machine, then plain and speculative decoding in turn, and the acceptance that was seen.

# %%
costs = stopwatch.measure(target, draft, repeats=7)
lengths, texts, sampling = (1, 2, 3, 5, 8), prompts(pair, 3), Sampling(1.0)
runs = {k: [] for k in (0, *lengths)}
for seed, text in enumerate(texts):  # in turn, so that a busy moment hits all of them
    for k in runs:
        options = {"max_new_tokens": 48, "sampling": sampling, "stop": (), "seed": seed}
        plain = k == 0
        runs[k].append(
            minispec.generate(target, text, **options)
            if plain
            else minispec.speculate(target, draft, text, tree=Tree.chain(k), **options)
        )
seconds = {k: sum(r.stats.seconds for r in runs[k]) for k in runs}
tokens = {k: sum(r.stats.new_tokens for r in runs[k]) for k in runs}
passes = {k: sum(r.stats.target_passes for r in runs[k]) for k in runs}
tested = sum(r.stats.tested for k in lengths for r in runs[k])
alpha = sum(r.stats.accepted for k in lengths for r in runs[k]) / tested
print(f"acceptance {alpha:.2f}, c = {costs.cost_ratio:.2f}, t(6) / t(1) = {costs.check(6) / costs.check(1):.2f}")

fig, axes = plt.subplots(1, 2, figsize=(10, 4))
axes[0].plot(lengths, [planner.expected_tokens(alpha, k) for k in lengths], "--", label="predicted")
axes[0].plot(lengths, [tokens[k] / passes[k] for k in lengths], "o", label="measured")
axes[0].set(xlabel="guesses K", ylabel="tokens a pass", title="What a step yields", ylim=(0, None))
axes[1].plot(lengths, [costs.speed_up(planner.expected_tokens(alpha, k), k + 1, k) for k in lengths], "--")
axes[1].plot(lengths, [seconds[0] / tokens[0] / (seconds[k] / tokens[k]) for k in lengths], "o")
axes[1].axhline(1, color="grey", linewidth=1)
axes[1].set(xlabel="guesses K", ylabel="speed-up", title="What it gains here", ylim=(0, None))
axes[0].legend()
plt.show()

# %% [markdown]
# Where the two differ: the prediction takes a as the same everywhere and leaves out the loop's own overhead (sampling, bookkeeping),
# and times of a busy machine scatter. `minispec bench` measures with more care.
#
# ## Summary
# - One step: draft K, score once, verify, commit. Between 1 and K + 1 tokens, exactly from p.
# - E[tokens] = (1 - a^(K+1)) / (1 - a); speed-up = E[tokens] / (t(K+1) / t(1) + K c).
# - The best K grows with acceptance and falls with the draft's cost.
#
# **Papers.** Leviathan et al. [2211.17192](https://arxiv.org/abs/2211.17192), theorem 3.8; Chen et al.
# [2302.01318](https://arxiv.org/abs/2302.01318); Stern, Shazeer and Uszkoreit, *Blockwise parallel decoding*,
# [1811.03115](https://arxiv.org/abs/1811.03115), where it began.
