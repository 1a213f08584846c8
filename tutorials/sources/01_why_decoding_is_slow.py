# %% [markdown]
# # 01 · Why decoding is slow
#
# *20 minutes. You need: nothing but school arithmetic.*
#
# **Goals.** You can say what a language model waits for when it writes one token; measure t(n), the time of one pass over n
# tokens; and explain why *checking* six tokens costs little more than *making* one. All of speculative decoding rests on
# that one fact.

# %%
import time

import matplotlib.pyplot as plt
import torch

import minispec
from minispec import stopwatch
from minispec.bench.machine import bytes_read
from minispec.teach import check, compare, device, prompts, source, style

style()
pair = minispec.load_pair(device=device())
target = pair.target
parameters = sum(w.numel() for w in target.parameters())
print(f"target: {parameters / 1e6:.1f} million weights, {parameters * 4 / 1e6:.0f} MB in float32, on {target.device}")

# %% [markdown]
# ## Predict first
# One pass over **one** token takes some time t(1). How long does one pass over **six** tokens take: as a multiple of t(1)?

# %%
my_guess = ...  # t(6) / t(1)

# %% [markdown]
# ## One token, all weights
# To write one token, the model multiplies one vector with every weight matrix. So every weight is read from memory, used
# for two operations (a product and a sum), and not needed again until the next token. How fast can memory be read here, and
# how fast can be computed?


# %%
def fastest(work, repeats=5):
    """Seconds of the fastest of some runs, the device's queue included."""
    return min(stopwatch.seconds(work, target.device) for _ in range(repeats))


block = torch.ones(64_000_000, device=target.device)  # 256 MB, far more than any processor's cache
square = torch.ones(1024, 1024, device=target.device)
bandwidth = block.numel() * 4 / fastest(block.sum)  # bytes a second
flops = 2 * 1024**3 / fastest(lambda: square @ square)  # operations a second
del block
print(f"memory: {bandwidth / 1e9:.1f} GB/s      arithmetic: {flops / 1e9:.0f} Gflop/s")
print(f"operations that could be done while one float32 weight is read: {flops / (bandwidth / 4):.0f}, used: 2")

# %% [markdown]
# ### Exercise 1
# How long does it take at least to read all weights once?


# %% exercise 01.token_time
def my_token_time(parameters, bytes_per_weight, bandwidth):
    """Seconds for one token if nothing but memory counts. bandwidth: bytes a second."""
    ...


# %% solution 01.token_time
def my_token_time(parameters, bytes_per_weight, bandwidth):
    """Seconds for one token if nothing but memory counts. bandwidth: bytes a second."""
    return parameters * bytes_per_weight / bandwidth


# %%
check("01.token_time", my_token_time)

# %% [markdown]
# Now let the model decode and look at the time per token. (`generate` keeps a cache of what it has read: notebook 02.) The file
# holds these weights in 16 bits, and on some processors they are read as such: half the bytes.

# %%
prompt = prompts(pair, 1)[0]
minispec.generate(target, prompt, max_new_tokens=4, seed=0)  # the first run warms up
plain = minispec.generate(target, prompt, max_new_tokens=64, seed=0)
per_token = plain.stats.seconds / plain.stats.new_tokens
held = bytes_read(target, held=True)
print(
    f"{1e3 * per_token:.1f} ms a token; reading all weights once, {held / 1e6:.0f} MB, takes {1e3 * held / bandwidth:.1f} ms"
)

# %% [markdown]
# ## Many tokens, the same weights
# A pass over n tokens reads every weight **once** and uses it n times. As long as memory is what we wait for, the other
# n - 1 tokens are nearly free.
#
# ### Exercise 2
# Reading and computing go on at the same time. Write the time of a pass over n tokens (the *roofline* model).


# %% exercise 01.pass_time
def my_pass_time(n, parameters, bytes_per_weight, bandwidth, flops):
    """Seconds of one pass over n tokens. flops: operations a second, 2 for each weight and token."""
    ...


# %% solution 01.pass_time
def my_pass_time(n, parameters, bytes_per_weight, bandwidth, flops):
    """Seconds of one pass over n tokens. flops: operations a second, 2 for each weight and token."""
    return max(parameters * bytes_per_weight / bandwidth, 2 * n * parameters / flops)


# %%
check("01.pass_time", my_pass_time)

# %% [markdown]
# And measured: `stopwatch.measure` times passes over 1 to 32 tokens, in turn, and takes medians.

# %%
costs = stopwatch.measure(pair.target, pair.draft, repeats=9)
sizes = sorted(costs.pass_time)
roofline = [max(held / bandwidth, 2 * n * parameters / flops) for n in sizes]
fig, ax = plt.subplots()
ax.plot(sizes, [1e3 * costs.pass_time[n] for n in sizes], "o-", label="measured: one pass over n tokens")
ax.plot(sizes, [1e3 * n * costs.pass_time[1] for n in sizes], "--", label="n passes over one token")
ax.plot(sizes, [1e3 * t for t in roofline], ":", label="roofline: the slower of memory and arithmetic")
ax.set(xlabel="tokens in the pass, n", ylabel="milliseconds", title="t(n) on this machine")
ax.set_ylim(0, 1e3 * max(costs.pass_time.values()) * 1.5)
ax.legend()
plt.show()
compare("t(6) / t(1)", my_guess, costs.check(6) / costs.check(1))

# %% [markdown]
# The measured curve lies above the roofline: a pass has fixed costs, and no program reaches both limits at once. But it lies
# far below the dashed line, and that gap is what speculative decoding lives on.
#
# (Where your curve is *not* flat, a machine under load or a processor with fast memory for its arithmetic, speculation gains
# less. Notebook 09 computes how much.)
#
# ## Why not simply write six tokens in one pass?
# Because token 2 depends on token 1: to ask for p(x2 | x1) one must know x1. Unless somebody **guesses** x1. Then one pass over
# the guesses gives the target's law after each of them, all at the price of one: it is *checking* that parallelises.

# %%
guess = pair.tokenizer.encode(" and the king said to")
start = time.perf_counter()
with torch.no_grad():
    p = (
        target(torch.tensor([prompt + guess], device=target.device))[0].softmax(-1).cpu()
    )  # (T, V): a law after each token
print(f"one pass, {len(prompt + guess)} laws:")
for i, x in enumerate(guess):
    law = p[len(prompt) - 1 + i]
    best = pair.tokenizer.decode([int(law.argmax())])
    print(f"  {pair.tokenizer.decode([x])!r:8} has p = {float(law[x]):.3f}   (likeliest: {best!r})")

# %% [markdown]
# What remains: who guesses (a small *draft* model: 02, 04, 07), and what to do with a wrong guess so that the text is
# *exactly* as if the target had written it alone (03).
#
# For the curious, this is all that `stopwatch.measure` does:

# %%
source(stopwatch.measure)

# %% [markdown]
# ## Summary
# - One token costs one reading of all weights. At batch 1 memory decides, arithmetic is idle.
# - A pass over a few tokens costs nearly what a pass over one costs: t(6) is far less than 6 t(1).
# - So guess cheaply, then check all guesses in one pass.
#
# **Papers.** Leviathan et al. [2211.17192](https://arxiv.org/abs/2211.17192), section 1; Chen et al.
# [2302.01318](https://arxiv.org/abs/2302.01318); Pope et al., *Efficiently scaling transformer inference*,
# [2211.05102](https://arxiv.org/abs/2211.05102).
