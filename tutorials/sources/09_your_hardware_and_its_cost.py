# %% [markdown]
# # 09 · Your hardware, and what it costs
#
# *25 minutes. You need: 01 and 04.*
#
# **Goals.** You can tell in advance whether speculation pays on a machine, with which K; what becomes of it with a larger target; and what a million
# tokens cost on a machine of your own, in hours, kilowatt-hours and money.

# %%
import matplotlib.pyplot as plt

import minispec
from minispec import Sampling, planner, stopwatch
from minispec.bench.machine import bytes_read, emulate_layers
from minispec.cost import ownership
from minispec.teach import check, compare, device, prompts, source, style

style()
pair = minispec.load_pair(device=device())
target, draft = pair.target, pair.draft

# %% [markdown]
# ## This machine
# Three numbers decide: acceptance a (the pair's), c (a draft step in target passes) and t(n) (the machine's).

# %%
costs = stopwatch.measure(target, draft, repeats=9)
texts = prompts(pair, 6)
runs = minispec.speculate(target, draft, texts, max_new_tokens=48, draft_len=5, stop=(), seed=0)
a = sum(run.stats.accepted for run in runs) / sum(run.stats.tested for run in runs)
print(
    f"a = {a:.2f}    c = {costs.cost_ratio:.2f}    t(2) / t(1) = {costs.check(2) / costs.check(1):.2f}    t(6) / t(1) = {costs.check(6) / costs.check(1):.2f}"
)

# %% [markdown]
# ### Exercise 1
# When does the *first* guess pay? With K = 1 a step yields 1 + a tokens. `check` is t(2) / t(1).


# %% exercise 09.pays
def my_pays(a, c, check):
    """Whether one guess a step is faster than plain decoding."""
    ...


# %% solution 09.pays
def my_pays(a, c, check):
    """Whether one guess a step is faster than plain decoding."""
    return (1 + a) / (check + c) > 1


# %%
check("09.pays", my_pays)

# %% [markdown]
# **Predict:** the best K here, and its speed-up.

# %%
my_guess = ...  # speed-up

# %%
lengths = range(13)
gains = [costs.speed_up(planner.expected_tokens(a, k), k + 1, k) for k in lengths]
best, gain = costs.best_chain(a)
fig, ax = plt.subplots()
ax.plot(lengths, gains, "o-")
ax.plot([best], [gain], "o", color="C1", markersize=14, label=f"best: K = {best}, {gain:.2f}x")
ax.axhline(1, color="grey", linewidth=1)
ax.set(xlabel="guesses K", ylabel="predicted speed-up", title="This machine, the shipped pair", ylim=(0, None))
ax.legend(loc="lower right")
plt.show()
compare("speed-up at the best K", my_guess, gain)

# %% [markdown]
# `tree="auto"` does this for you: it measures once, chooses rule and tree, and remembers the plan in the user's cache folder.
# `minispec bench` prints predictions beside measurements.
#
# ## A larger target
# With a larger target a draft of the same size costs relatively less: c falls, and speculation pays more. The same *function* at the cost of more
# layers can be had by appending layers whose output is zero: an emulation, honest about time and memory, not about quality.
#
# **Predict:** the target with four times the layers. Does the speed-up double?

# %%
source(emulate_layers, docstring=False)

# %%
rows = []
for times in (1, 2, 4):
    larger = emulate_layers(target, (times - 1) * target.config.n_layer)
    here = stopwatch.measure(larger, draft, repeats=5, sizes=(1, 2, 4, 6, 9, 13))
    k, gain = here.best_chain(a)
    rows.append((larger.config.n_layer, bytes_read(larger, held=True) / 1e6, here.cost_ratio, k, gain))
    print(
        f"{rows[-1][0]:3} layers, {rows[-1][1]:4.0f} MB a pass: {1e3 * here.check(1):5.1f} ms a token, c = {here.cost_ratio:.3f}, best K = {k}, {gain:.2f}x"
    )
fig, ax = plt.subplots()
ax.bar([str(layers) for layers, *_ in rows], [gain for *_, gain in rows], color="C2")
ax.axhline(
    1 / (1 - a),
    color="C1",
    linestyle="--",
    label=f"limit 1 / (1 - a) = {1 / (1 - a):.1f}, if drafting and checking were free",
)
ax.set(
    xlabel="layers of the target (emulated)",
    ylabel="predicted speed-up",
    title="The same draft, a larger target",
    ylim=(0, 1.35 / (1 - a)),
)
ax.legend(loc="upper left")
plt.show()

# %% [markdown]
# ## What a million tokens cost
# On a machine of your own two things cost: its hours (purchase, room, upkeep) and its electricity. Speculation changes the *speed*, and hardly the power.
#
# ### Exercise 2
# Write the cost of a million tokens.


# %% exercise 09.money
def my_money(tokens_per_second, watts, price_per_kwh, price_per_hour):
    """Cost of a million tokens: electricity and hours of the machine, in the prices' currency."""
    ...


# %% solution 09.money
def my_money(tokens_per_second, watts, price_per_kwh, price_per_hour):
    """Cost of a million tokens: electricity and hours of the machine, in the prices' currency."""
    hours = 1e6 / tokens_per_second / 3600
    return hours * (watts / 1000 * price_per_kwh + price_per_hour)


# %%
check("09.money", my_money)

# %% [markdown]
# Put your own machine in. (A laptop draws some 30 to 60 watts under load; a rack server several hundred. Measure with a socket meter where you can.)

# %%
watts, price_per_kwh, price_per_hour = 45, 0.30, 0.05  # change these

options = {"max_new_tokens": 64, "stop": (), "seed": 1, "sampling": Sampling(1.0)}
minispec.generate(target, texts[0], **options)  # warms up
plain, fast = [], []
for text in texts[:3]:  # in turn
    plain.append(minispec.generate(target, text, **options))
    fast.append(minispec.speculate(target, draft, text, draft_len=max(best, 1), rule="block", **options))
bills = {}
for name, runs in (("plain", plain), ("speculative", fast)):
    speed = sum(r.stats.new_tokens for r in runs) / sum(r.stats.seconds for r in runs)
    bills[name] = ownership(speed, watts, price_per_hour, price_per_kwh)
    bill = bills[name]
    print(
        f"{name:12} {speed:6.0f} tokens/s: a million take {bill.hours:5.2f} h, {bill.energy:5.3f} kWh, {bill.money:5.2f} in money"
    )
fig, axes = plt.subplots(1, 3, figsize=(10, 3.2))
for ax, unit in zip(axes, ("hours", "energy", "money"), strict=True):
    ax.bar(list(bills), [getattr(bill, unit) for bill in bills.values()], color=["C0", "C2"])
    ax.set(title={"hours": "hours", "energy": "kWh", "money": "cost"}[unit] + " per million tokens")
    ax.title.set_fontsize(12)
plt.show()

# %% [markdown]
# ## Without a network
# Nothing here has used a network: weights, tokenizer and prompts are files, checked by SHA-256, and nothing in them is executed. For a machine behind an
# air gap prepare a folder of wheels once (`pip download`, see `WORKSHOP.md`) and carry it over. Text that must not leave the house does not, and a
# speculative decoder gives it the speed of a machine two or three times as dear, *without changing the distribution of a single token*: what was
# approved for the target holds for the pair.
#
# When does it **not** pay? Many rows at once (08), a draft that does not know the target (07), a target so small that the draft is not much smaller, a
# processor on which t(n) rises from the start (01).
#
# ## Summary
# - The first guess pays when a > c + t(2) / t(1) - 1. The best K follows from a, c and t(n).
# - A larger target makes the same draft cheaper: the gain rises towards 1 / (1 - a).
# - Hours, energy and money per million tokens all fall by the speed-up.
#
# **Papers.** Leviathan et al. [2211.17192](https://arxiv.org/abs/2211.17192), section 3.4 and theorem 3.11; Sequoia's hardware-aware search
# [2402.12374](https://arxiv.org/abs/2402.12374); Patterson et al. on energy [2104.10350](https://arxiv.org/abs/2104.10350).
