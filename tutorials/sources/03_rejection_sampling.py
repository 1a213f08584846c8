# %% [markdown]
# # 03 · Rejection sampling: a wrong guess costs nothing
#
# *25 minutes. You need: what a probability distribution is.*
#
# **Goals.** You can say why a token that was drawn from the *wrong* law q can come out with exactly the *right* law p;
# write the three lines that do it; and predict how often a guess is accepted.
#
# | symbol | meaning |
# |---|---|
# | p | the **target**'s law of the next token: what the output must follow |
# | q | the **draft**'s law: what the guess x was really drawn from |
# | (u)+ | u where u > 0, else 0 |
# | TV(p, q) | total variation, half the sum of \|p - q\| |

# %%
import matplotlib.pyplot as plt
import torch

import minispec
from minispec import Randomness, verify
from minispec.lab import exact_law
from minispec.teach import Dice, check, compare, device, prompts, source, style

style()
p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

# %% [markdown]
# ## Predict first
# A token x is drawn from q. A coin then decides whether it stands, such that the outcome follows p. **How often does the
# guess stand?** Look at the two laws and write down a number between 0 and 1 before you go on.

# %%
my_guess = ...  # a number between 0 and 1

# %%
tokens = torch.arange(3)
fig, ax = plt.subplots()
ax.bar(tokens - 0.2, p, 0.4, label="p (target)")
ax.bar(tokens + 0.2, q, 0.4, label="q (draft)")
ax.set(xticks=tokens, xlabel="token", ylabel="probability", title="Two laws over three tokens")
ax.legend()
plt.show()

# %% [markdown]
# ## The coin
# Token 1 comes too often: q draws it half of the time and p wants it in three cases of ten. So it should pass in three
# of five cases only. Token 0 comes too seldom: it should always pass.
#
# ### Exercise 1
# Write the probability with which x is accepted.


# %% exercise 03.accept
def my_accept(p, q, x):
    """Probability of accepting token x, which was drawn from q. p, q: (V,); x: an index."""
    ...


# %% solution 03.accept
def my_accept(p, q, x):
    """Probability of accepting token x, which was drawn from q. p, q: (V,); x: an index."""
    return min(1.0, float(p[x] / q[x]))


# %%
check("03.accept", my_accept)

# %% [markdown]
# ## What is missing
# x is drawn *and* accepted with probability q(x) min(1, p(x) / q(x)) = **min(p(x), q(x))**: the overlap of the two laws.
# What p has beyond the overlap is (p - q)+. The guess was rejected just as often as that adds up to. So after a
# rejection we draw from (p - q)+, scaled to sum to 1: the **residual**.

# %%
overlap, missing = torch.minimum(p, q), (p - q).clamp(min=0)
fig, ax = plt.subplots()
ax.bar(tokens, overlap, 0.5, label="min(p, q): accepted guesses", color="C0")
ax.bar(tokens, missing, 0.5, bottom=overlap, label="(p - q)+: drawn after a rejection", color="C2")
ax.plot(tokens, p, "k_", markersize=70, label="p")
ax.set(xticks=tokens, xlabel="token", ylabel="probability", title="min(p, q) + (p - q)+ = p")
ax.legend(markerscale=0.25)
plt.show()

# %% [markdown]
# That is the whole proof, in two lines:
#
# $$P(\text{out} = x) = q(x)\,\min\left(1, \tfrac{p(x)}{q(x)}\right) + P(\text{rejected}) \cdot
# \frac{(p(x) - q(x))_+}{\sum_y (p(y) - q(y))_+}$$
#
# $$ = \min(p(x), q(x)) + (p(x) - q(x))_+ = p(x), \qquad\text{as}\quad P(\text{rejected}) = 1 - \sum_y \min(p, q) =
# \sum_y (p - q)_+$$
#
# ### Exercise 2
# Write the residual. If p = q nothing is left and nothing will ever be rejected: return p then.


# %% exercise 03.residual
def my_residual(p, q):
    """The law to draw from after a rejection: (V,), (V,) -> (V,)."""
    ...


# %% solution 03.residual
def my_residual(p, q):
    """The law to draw from after a rejection: (V,), (V,) -> (V,)."""
    rest = (p - q).clamp(min=0)
    return rest / rest.sum() if rest.sum() > 0 else p


# %%
check("03.residual", my_residual)

# %% [markdown]
# ### Exercise 3
# Put it together: draw x from q, flip the coin, return x or a token of the residual. `dice.pick(weights)` draws an index,
# `dice.flip(prob)` is `True` with that probability. The check does not sample: it replays your function over *every*
# outcome of every draw and adds up the probabilities.


# %% exercise 03.step
def my_step(p, q, dice):
    """One guess from q, verified: a token that follows p."""
    ...


# %% solution 03.step
def my_step(p, q, dice):
    """One guess from q, verified: a token that follows p."""
    x = dice.pick(q)
    if dice.flip(my_accept(p, q, x)):
        return x
    return dice.pick(my_residual(p, q))


# %%
check("03.step", my_step)

# %% [markdown]
# ## The package's own rule
# `verify.token` does the same for a whole chain of guesses and many rows at once. Where all K guesses stand, the "residual"
# against an all-zero q is p itself: the free *bonus* token.

# %%
source(verify.token)

# %%
N = 50_000  # rows, each with one guess
laws_p, laws_q = p.expand(N, 2, 3), q.expand(N, 1, 3)  # two places: the guess, and the bonus after it
rng = Randomness(seed=0)
x = torch.multinomial(q.float(), N, replacement=True, generator=torch.Generator().manual_seed(0))  # (N,)
accepted, emitted = verify.token(laws_p, laws_q, x[:, None], rng)
first = torch.where(accepted == 1, x, emitted)

share = torch.bincount(first, minlength=3) / N
fig, ax = plt.subplots()
ax.bar(tokens - 0.2, share, 0.4, label=f"what came out of {N:,} runs", color="C2")
ax.bar(tokens + 0.2, p, 0.4, label="p", color="C0")
ax.set(xticks=tokens, xlabel="token", ylabel="share of runs", title="Guessed with q, distributed as p")
ax.legend()
plt.show()

# %% [markdown]
# ## How often a guess stands
#
# ### Exercise 4
# Write the probability that a guess is accepted, from p and q alone.


# %% exercise 03.acceptance
def my_acceptance(p, q):
    """P(a token drawn from q is accepted): (V,), (V,) -> a number."""
    ...


# %% solution 03.acceptance
def my_acceptance(p, q):
    """P(a token drawn from q is accepted): (V,), (V,) -> a number."""
    return float(torch.minimum(p, q).sum())


# %%
check("03.acceptance", my_acceptance)

# %%
compare("share of guesses that stood", my_guess, float((accepted == 1).double().mean()))
print(f"1 - TV(p, q) = {1 - 0.5 * float((p - q).abs().sum()):.3f}")

# %% [markdown]
# ## What the wrong variants do
# Each of these was found in real code. Predict for each: which token comes too often?


# %%
def variant(chance, rest):
    """A step with another coin and another residual, as an exact law (V,)."""

    def draw(rng):
        dice = Dice(rng)
        x = dice.pick(q)
        return x if dice.flip(chance(x)) else dice.pick(rest(x))

    law = exact_law(draw)
    return torch.tensor([law.get(t, 0.0) for t in range(3)], dtype=torch.float64)


def coin(x):
    return min(1.0, float(p[x] / q[x]))


def residual(x):
    return verify.residual(p, q)


variants = {
    "right": variant(coin, residual),
    "draws again from p": variant(coin, lambda x: p),
    "only drops x": variant(coin, lambda x: p.scatter(0, torch.tensor(x), 0.0)),
    "|p - q|": variant(coin, lambda x: (p - q).abs()),
    "no coin: p >= q": variant(lambda x: float(p[x] >= q[x]), residual),
    "ratio inverted": variant(lambda x: min(1.0, float(q[x] / p[x])), residual),
}
fig, ax = plt.subplots(figsize=(9, 4.2))
for i, law in enumerate(variants.values()):
    ax.bar(i + 0.26 * (tokens - 1), law, 0.24, color=["C0", "C1", "C2"])
for t in range(3):
    ax.axhline(p[t], color=f"C{t}", linestyle="--", linewidth=1.5)
    ax.bar(0, 0, color=f"C{t}", label=f"token {t} (dashed: p)")
ax.set_xticks(range(len(variants)), list(variants), rotation=15, fontsize=11)
ax.set(ylabel="probability", title="What each variant emits", ylim=(0, 1.3))
ax.legend(ncols=3, fontsize=11)
plt.show()
for name, law in variants.items():
    print(f"{name:20s} TV to p = {0.5 * float((law - p).abs().sum()):.3f}")

# %% [markdown]
# Every variant prints fluent text. Nobody would notice from reading; that is why notebook 05 is about *tests*.
#
# ## In a real pair
# The shipped target and draft: the overlap of their laws at each place of a text, and what the decoder then measures.

# %%
pair = minispec.load_pair(device=device())
result = minispec.speculate(pair.target, pair.draft, prompts(pair, 1)[0], max_new_tokens=96, draft_len=4, seed=0)
ids = torch.tensor([result.prompt + result.tokens], device=pair.target.device)
with torch.no_grad():
    P, Q = pair.target(ids)[0].softmax(-1), pair.draft(ids)[0].softmax(-1)  # (T, V)
alpha = torch.minimum(P, Q).sum(-1).cpu()  # (T,): sum min(p, q) at each place

fig, ax = plt.subplots()
ax.bar(range(len(alpha)), alpha, 1.0)
ax.axhline(alpha.mean(), color="C1", label=f"mean {alpha.mean():.2f}")
ax.set(xlabel="place in the text", ylabel="1 - TV(p, q)", title="Where the draft knows what the target will say")
ax.legend(loc="lower right")
plt.show()
print(
    f"mean of sum min(p, q): {alpha.mean():.3f}; accepted / tested while decoding: {result.stats.acceptance_rate:.3f}"
)

# %% [markdown]
# (The two figures differ a little: the first is a mean over all places of the text, the second over those where a guess
# was tested, and both are of one short text.)
#
# ## Summary
# - Accept x ~ q with min(1, p(x) / q(x)); after a rejection draw from norm((p - q)+). The outcome follows p *exactly*.
# - P(accept) = sum min(p, q) = 1 - TV(p, q): the draft's quality is a distance between laws, not its own perplexity.
# - What is called q must be the law that x was *really drawn from*, temperature, top-k and top-p included.
#
# **Papers.** Leviathan, Kalman and Matias, *Fast inference from transformers via speculative decoding*,
# [2211.17192](https://arxiv.org/abs/2211.17192); Chen et al., *Accelerating large language model decoding with speculative
# sampling*, [2302.01318](https://arxiv.org/abs/2302.01318).
