# %% [markdown]
# # 05 · Is it lossless?
#
# *35 minutes. You need: 03 and 04.*
#
# **Goals.** You can prove a decoder lossless, without statistics; plan a statistical test that would see an error of given size; say what such a test
# cannot see; find a bug by its law; and put a rule of your own on the test-bench.

# %%
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import minispec
from minispec import lab
from minispec.lab.museum import PIECES
from minispec.lab.report import CHECKS
from minispec.teach import check, compare, source, style
from minispec.teach.lossless import suspects

style()
target, draft = lab.random_pair()  # two tiny random GPTs over three tokens, in float64

# %% [markdown]
# ## Predict first
# A decoder draws its bonus token from the wrong model. How many outputs of it would you have to *read* before you notice? And how many outputs does a
# good statistical test need to be (practically) sure?

# %%
my_guess = ...  # outputs for the test

# %% [markdown]
# ## Proof by enumeration
# All randomness of the package goes through two methods, `flip` and `pick`. So replace them by a machine that tries **every** outcome in turn and keeps
# account of the probabilities: what comes out is the *exact* law of the real decoder, real cache and rollback included.

# %%
source(lab.exact_law)


# %%
def decoder(rule):
    """The exact law of four tokens, two guesses a step."""
    return lab.exact_law(
        lambda rng: tuple(
            minispec.speculate(target, draft, [0], max_new_tokens=3, draft_len=2, rule=rule, rng=rng).tokens
        )
    )


right = lab.target_law(target, [0], 3)
for rule in ("token", "block"):
    law = decoder(rule)
    print(f"{rule}: {len(law)} texts, total variation to the target's law {lab.total_variation(law, right):.1e}")

# %% [markdown]
# The difference is rounding of 64-bit numbers. This is no experiment: for these models it is a proof.
#
# ## Tests by sampling
# Enumeration needs a small model and replaces the generator itself. For all else one samples N texts, counts them, and compares with the right law: Pearson's
# chi-squared test. A test can be blind, so ask first: *would it have seen an error?* An error of total variation TV raises chi-squared by about
# lambda >= 4 N TV^2; the test is sure (power 0.99, level 1e-6) once lambda reaches some 60 to 200, depending on the number of possible texts.
#
# ### Exercise 1
# How many samples, then, for an error of size `tv`?


# %% exercise 05.samples
def my_samples(tv, noncentrality):
    """N so that 4 N TV^2 reaches the noncentrality that the test needs."""
    ...


# %% solution 05.samples
def my_samples(tv, noncentrality):
    """N so that 4 N TV^2 reaches the noncentrality that the test needs."""
    return noncentrality / (4 * tv**2)


# %%
check("05.samples", my_samples)

# %%
sizes = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
fig, ax = plt.subplots()
ax.plot(sizes, [lab.required_samples(right, tv) for tv in sizes], "o-")
ax.set(
    xscale="log",
    yscale="log",
    xlabel="error to be seen, in total variation",
    ylabel="samples",
    title="Texts of three tokens, power 0.99, level 1e-6",
)
plt.show()

# %% [markdown]
# ## First token, or whole text?
# A museum piece: the *bonus token comes from the draft*. Both tests get the same texts: one looks at the first token alone, one at whole texts.

# %%
piece = next(piece for piece in PIECES if piece.name == "bonus token from the draft")
N = 4000
runs = minispec.speculate(target, draft, [[0]] * N, max_new_tokens=4, draft_len=2, rule=piece.part, seed=1)
texts = [tuple(run.tokens) for run in runs]
joint, first = lab.target_law(target, [0], 4), lab.target_law(target, [0], 1)
for name, counts, law in (("first token", Counter(t[:1] for t in texts), first), ("whole text", Counter(texts), joint)):
    verdict = lab.chi_squared(counts, law)
    print(f"{name:11}: p-value {verdict.p_value:.1e}, {'passed' if verdict.passed else 'REJECTED'}")
compare("samples that the test needs", my_guess, lab.required_samples(joint, 0.1))
print(f"(for an error of total variation 0.1; the measured one is {verdict.tv:.2f})")

# %% [markdown]
# A test of the first token (the usual one, if there is one) cannot see a bug that needs a full acceptance first. The museum, and which check catches what:

# %%
shown = [c for c in CHECKS if any(c in piece.caught_by for piece in PIECES)]
caught = [[check in piece.caught_by for check in shown] for piece in PIECES]
fig, ax = plt.subplots(figsize=(9.5, 9))
ax.imshow(caught, cmap="Blues", vmax=1.6, aspect="auto")
ax.set_yticks(range(len(PIECES)), [piece.name for piece in PIECES], fontsize=11)
ax.set_xticks(range(len(shown)), shown, rotation=60, ha="right", fontsize=11)
ax.set_xticks([x - 0.5 for x in range(len(shown))], minor=True)
ax.set_yticks([y - 0.5 for y in range(len(PIECES))], minor=True)
ax.grid(False)
ax.grid(True, which="minor", color="white", linewidth=2, alpha=1)
ax.tick_params(which="minor", length=0)
ax.set_title("What catches which bug", fontsize=14)
plt.show()
missed = sum("first-token law" not in piece.caught_by for piece in PIECES)
print(f"{len(PIECES)} bugs; a test of the first token misses {missed} of them")

# %% [markdown]
# ## Find the bug
# Three rules, A, B and C. Their exact first-token laws, and the laws of whole texts:

# %%
fig, axes = plt.subplots(1, 2, figsize=(10.5, 4))
names, order = list(suspects()), sorted(right, key=lambda text: -right[text])[:8]
for i, name in enumerate(["target", *names]):
    law = right if name == "target" else decoder(suspects()[name])
    tokens = [sum(prob for text, prob in law.items() if text[0] == t) for t in range(3)]
    axes[0].bar([t + 0.2 * (i - 1.5) for t in range(3)], tokens, 0.18, label=name)
    axes[1].bar([t + 0.2 * (i - 1.5) for t in range(8)], [law.get(text, 0) for text in order], 0.18)
    print(f"{name:7} total variation to the target's law: {lab.total_variation(law, right):.3f}")
axes[0].set(xticks=range(3), xlabel="first token", ylabel="probability", title="First token")
axes[1].set_xticks(range(8), ["".join(map(str, text)) for text in order])
axes[1].set(xlabel="the eight likeliest texts", title="Whole texts")
axes[0].legend(fontsize=11)
plt.show()

# %% [markdown]
# ### Exercise 2
# Which of these is true of A, of B, of C?
# 1. after a rejection it draws from p
# 2. the bonus comes from the draft
# 3. no coin: it accepts where p >= q
# 4. the ratio is upside down
# 5. nothing is wrong

# %% exercise 05.bug
my_answer = {"A": ..., "B": ..., "C": ...}

# %% solution 05.bug
my_answer = {"A": 2, "B": 5, "C": 1}

# %%
check("05.bug", my_answer)

# %% [markdown]
# The machine's own verdict. `check_rule` enumerates, samples, compares caches, and looks the bug up in the museum:

# %%
report = lab.check_rule(suspects()["A"])
print(report)

# %% [markdown]
# ## Your own rule on the bench
# ### Exercise 3
# Write a verification rule in the package's interface: B rows, K guesses each. The beginning is given. An *absent* guess (rows differ in length) has token -1
# and an all-zero q: it must never be accepted, and the residual against it is p itself. `minispec.verify.residual` and `count_accepted` may be used.


# %% exercise 05.rule
def my_rule(p, q, drafted, rng):
    """p (B, K+1, V), q (B, K, V), drafted (B, K) -> accepted (B,), next token (B,)."""
    B, K = drafted.shape
    x = drafted.clamp(min=0)[..., None]  # (B, K, 1)
    p_x, q_x = p[:, :K].gather(2, x)[..., 0], q.gather(2, x)[..., 0]  # (B, K)
    # coins for all guesses at once, rng.flip(chance (B, K)); how many are accepted; rng.pick(weights (B, V))
    return None


# %% solution 05.rule
def my_rule(p, q, drafted, rng):
    """p (B, K+1, V), q (B, K, V), drafted (B, K) -> accepted (B,), next token (B,)."""
    B, K = drafted.shape
    x = drafted.clamp(min=0)[..., None]  # (B, K, 1)
    p_x, q_x = p[:, :K].gather(2, x)[..., 0], q.gather(2, x)[..., 0]  # (B, K)
    chance = torch.where(q_x > 0, p_x / q_x, 0.0).clamp(max=1)  # (B, K)
    accepted = minispec.verify.count_accepted(rng.flip(chance))  # (B,)
    row = torch.arange(B)
    q = torch.cat([q, torch.zeros_like(p[:, :1])], 1)  # (B, K+1, V): after the last guess the "residual" is p
    return accepted, rng.pick(minispec.verify.residual(p[row, accepted], q[row, accepted]))


# %%
check("05.rule", my_rule)

# %% [markdown]
# Anyone's rule can be put on the bench without knowing the package, as a file:
#
# ```bash
# pytest --pyargs minispec.checks --rule my_rule.py:verify
# ```
#
# Here is one with a classical bug, written to a file and tested. **Predict:** which checks will fail? Then put your own rule in its place.

# %%
Path("my_rule.py").write_text(
    """
import torch
from minispec.verify import count_accepted


def verify(p, q, drafted, rng):
    B, K = drafted.shape
    x = drafted.clamp(min=0)[..., None]
    p_x, q_x = p[:, :K].gather(2, x)[..., 0], q.gather(2, x)[..., 0]
    accepted = count_accepted(rng.flip(torch.where(q_x > 0, p_x / q_x, 0.0).clamp(max=1)))
    return accepted, rng.pick(p[torch.arange(B), accepted])  # "just sample from the target again"
""",
    encoding="utf-8",
)
bench = [
    sys.executable,
    "-m",
    "pytest",
    "-q",
    "--tb=no",
    "--color=no",
    "-p",
    "no:cacheprovider",
    "--pyargs",
    "minispec.checks",
    "--rule",
    "my_rule.py:verify",
    "--samples",
    "2000",
]
run = subprocess.run(bench, capture_output=True, text=True, encoding="utf-8", env=os.environ | {"COLUMNS": "150"})
print(run.stdout[-4000:] or run.stderr[-2000:])

# %% [markdown]
# In your own project's tests: `from minispec.lab import assert_lossless`, with any callable `decoder(prompt, n, seed) -> tokens`.
#
# ## Summary
# - Fluent text proves nothing; neither does a test of the first token.
# - Enumerate what is small enough: exact, and no luck involved. Sample the rest, and say what error the sample would have shown.
# - Half the error takes four times the samples.
# - A bug in the draft's cache leaves the law intact: losslessness tests are blind to it, efficiency tests are not.
#
# **Papers.** The proofs: Leviathan et al. [2211.17192](https://arxiv.org/abs/2211.17192), appendix A; Chen et al.
# [2302.01318](https://arxiv.org/abs/2302.01318), theorem 1. What rounding does to equality of tokens: Zhang et al. on batches,
# [2510.22876](https://arxiv.org/abs/2510.22876).
