# %% [markdown]
# # 06 · Trees: several guesses for one place
#
# *35 minutes. You need: 03 and 04.*
#
# **Goals.** You can score a whole tree of guesses in one pass (mask and positions); draw siblings so that verification stays exact; find
# the best shape for a given acceptance; and say when a tree pays and when a chain is better.

# %%
import matplotlib.pyplot as plt
import torch

import minispec
from minispec import Tree, planner, verify
from minispec.advanced import acceptance_by_rank
from minispec.lab import exact_law
from minispec.teach import Dice, check, device, prompts, source, style

style()
pair = minispec.load_pair(device=device())
target, draft, tokenizer = pair.target, pair.draft, pair.tokenizer

# %% [markdown]
# ## Predict first
# You may submit 16 guesses in one pass. A chain of 16? Two chains of 8? A bush with four first tokens? Write down what you would do if each
# guess stood with probability (a) 0.9, (b) 0.5.

# %%
my_guess = ...  # words are fine

# %% [markdown]
# ## A tree in one pass
# Node 0 is the pending token; a node's parent is the token before it. Siblings are alternatives for the same place.


# %%
def draw_tree(ax, tree, labels=None, title=""):
    """Nodes by depth from left to right, each level spread out."""
    depth = tree.depths[0].tolist()
    leaves, height = 0, {}

    def place(node):
        nonlocal leaves
        below = [place(child) for child in tree.children(node)]
        if not below:
            leaves += 1
        height[node] = sum(below) / len(below) if below else -leaves
        return height[node]

    place(0)
    for node, parent in enumerate(tree.rows[0][1:], start=1):
        ax.plot([depth[parent], depth[node]], [height[parent], height[node]], color="grey", zorder=1, linewidth=1.5)
    size = 500 if tree.size < 12 else 120
    ax.scatter(depth, [height[n] for n in range(tree.size)], s=size, color=["C1"] + ["C0"] * (tree.size - 1), zorder=2)
    for node in range(tree.size if tree.size < 12 else 0):
        ax.text(
            depth[node], height[node], labels[node] if labels else node, ha="center", va="center", color="w", zorder=3
        )
    ax.set(title=title, xlabel="depth", yticks=[], xticks=range(tree.max_depth + 1), xlim=(-0.4, tree.max_depth + 0.4))
    ax.margins(y=0.2)
    ax.grid(False)


parents = [-1, 0, 0, 1, 1, 2]
tree = Tree.from_parents(parents)
fig, axes = plt.subplots(1, 2, figsize=(9, 3.8))
draw_tree(axes[0], tree, title=f"parents = {parents}")
axes[1].imshow(tree.mask[0], cmap="Blues", vmin=0, vmax=1.6)
axes[1].set(xlabel="sees node", ylabel="node", title="mask", xticks=range(6), yticks=range(6))
axes[1].grid(False)
plt.show()

# %% [markdown]
# All nodes are read in **one** pass. So that each branch is scored as if it stood alone, a node sees itself and its ancestors only.
#
# ### Exercise 1
# Write the mask.


# %% exercise 06.mask
def my_mask(parents):
    """mask[i][j]: whether node i sees node j: N lists of N booleans. parents[0] = -1."""
    ...


# %% solution 06.mask
def my_mask(parents):
    """mask[i][j]: whether node i sees node j: N lists of N booleans. parents[0] = -1."""
    mask = [[False] * len(parents) for _ in parents]
    for i in range(len(parents)):
        j = i
        while j >= 0:
            mask[i][j] = True
            j = parents[j]
    return mask


# %%
check("06.mask", my_mask)

# %% [markdown]
# ### Exercise 2
# Where does each node stand? The text has n tokens, the pending one included; positions count from 0.


# %% exercise 06.positions
def my_positions(parents, n):
    """The position of each node, N integers."""
    ...


# %% solution 06.positions
def my_positions(parents, n):
    """The position of each node, N integers."""
    positions = [n - 1]
    for parent in parents[1:]:
        positions.append(positions[parent] + 1)
    return positions


# %%
check("06.positions", my_positions)

# %% [markdown]
# Does it work? The tree in one pass against every path on its own, with the real target:

# %%
prompt = prompts(pair, 4)[3]
n = len(prompt)
words = [prompt[-1]] + [tokenizer.encode(w)[0] for w in (" he", " the", " could", " was", " king")]
with torch.no_grad():
    cache = minispec.KVCache(target.config, capacity=256, device=target.device)
    target(torch.tensor([prompt[:-1]], device=target.device), cache)
    positions = (n - 1 + tree.depths).to(target.device)
    logits = target(torch.tensor([words], device=target.device), cache, positions, tree.mask.to(target.device))[0]
    for node in range(tree.size):
        path, up = [], node
        while up > 0:
            path.insert(0, words[up])
            up = parents[up]
        alone = target(torch.tensor([prompt + path], device=target.device))[0, -1]
        print(f"node {node} {tokenizer.decode(path)!r:12}: difference {float((logits[node] - alone).abs().max()):.1e}")

# %% [markdown]
# ## Siblings
# Two independent draws from q may be the same token: a wasted guess. So siblings are drawn **without replacement**. The second one then
# has another law, and that is the q its coin must use.
#
# ### Exercise 3
# The law of the second sibling, once x was drawn.


# %% exercise 06.next_law
def my_next_law(q, x):
    """The law of the next sibling: (V,), an index -> (V,)."""
    ...


# %% solution 06.next_law
def my_next_law(q, x):
    """The law of the next sibling: (V,), an index -> (V,)."""
    rest = q.clone()
    rest[x] = 0.0
    return rest / rest.sum()


# %%
check("06.next_law", my_next_law)

# %% [markdown]
# *Recursive rejection sampling* tries the siblings in turn: accept x with min(1, p(x) / q_x(x)), else p becomes the residual against q_x and
# the next sibling is tried.

# %%
source(verify.rrs)

# %% [markdown]
# Two children of one node, every outcome enumerated. **Predict:** which of the wrong variants is furthest from p?

# %%
p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def two_children(told, order=lambda pair: pair):
    """The exact law of a node with two children drawn without replacement; `told` is what their coins take for q."""

    def run(rng):
        dice, law = Dice(rng), p
        x = dice.pick(q)
        second = q.clone()
        second[x] = 0.0
        second = second / second.sum()
        y = dice.pick(second)
        for token, q_x in order([(x, q), (y, told(q, second))]):
            if dice.flip(float(law[token] / q_x[token]) if q_x[token] > 0 else 0.0):
                return token
            law = verify.residual(law, q_x)
        return dice.pick(law)

    found = exact_law(run)
    return torch.tensor([found.get(t, 0.0) for t in range(4)], dtype=torch.float64)


variants = {
    "right": two_children(lambda q, second: second),
    "second coin uses the first q": two_children(lambda q, second: q),
    "siblings sorted by q": two_children(lambda q, s: s, lambda pair: sorted(pair, key=lambda c: -float(q[c[0]]))),
}
fig, ax = plt.subplots()
for i, (name, law) in enumerate(variants.items()):
    ax.bar(torch.arange(4) + 0.25 * (i - 1), law, 0.24, label=f"{name}: TV {0.5 * float((law - p).abs().sum()):.3f}")
ax.plot(range(4), p, "k_", markersize=90, label="p")
ax.set(
    xlabel="token",
    ylabel="probability",
    xticks=range(4),
    title="Two children, drawn without replacement",
    ylim=(0, 0.75),
)
ax.legend(markerscale=0.2, fontsize=11)
plt.show()

# %% [markdown]
# Sorting, pruning or dropping siblings *after* looking at them changes their law. If candidates are chosen by looking (top-k, n-grams, dynamic
# trees), use the rule `match`: draw y from p, and descend if y is among the children. It never asks where they came from.
#
# ## The best shape
# Let rates[j] be the probability that the child of rank j is the one accepted, given that its parent was.
#
# ### Exercise 4
# How many tokens does a tree yield on average?


# %% exercise 06.expected_tokens
def my_expected_tokens(parents, rates):
    """Expected tokens of a step. The j-th child of a node (in order of the nodes) has rates[j]."""
    ...


# %% solution 06.expected_tokens
def my_expected_tokens(parents, rates):
    """Expected tokens of a step. The j-th child of a node (in order of the nodes) has rates[j]."""
    reached = [1.0]
    for node, parent in enumerate(parents[1:], start=1):
        rank = parents[1:node].count(parent)
        reached.append(reached[parent] * rates[rank])
    return sum(reached)


# %%
check("06.expected_tokens", my_expected_tokens)

# %% [markdown]
# Sequoia finds the best tree by dynamic programming: `Tree.best(rates, nodes)`. The same 17 nodes for a sure and for an unsure draft:

# %%
sure, unsure = (0.9, 0.04, 0.02), (0.45, 0.18, 0.1, 0.06)
fig, axes = plt.subplots(1, 2, figsize=(10, 4))
for ax, rates, name in zip(axes, (sure, unsure), ("sure", "unsure"), strict=True):
    best = Tree.best(rates, 17)
    gain = best.expected_tokens(rates), Tree.chain(16).expected_tokens(rates)
    draw_tree(ax, best, title=f"{name}: {gain[0]:.2f} tokens (chain: {gain[1]:.2f})")
plt.show()
source(Tree.best)

# %% [markdown]
# ## The shipped pair
# Acceptance by child rank, measured with a small bush, and the best tree for it:

# %%
texts = prompts(pair, 6)


def decode(shape, seeds):
    """Runs of six prompts with each seed."""
    options = {"max_new_tokens": 128, "tree": shape, "rule": "rrs", "stop": ()}
    return [run for seed in seeds for run in minispec.speculate(target, draft, texts, seed=seed, **options)]


rates = acceptance_by_rank([step for run in decode(Tree.branching([3, 2]), range(2)) for step in run.steps])
print("acceptance by rank:", [round(r, 3) for r in rates])
shapes = {"chain of 12": Tree.chain(12), "bush [3, 2]": Tree.branching([3, 2]), "best, 13 nodes": Tree.best(rates, 13)}
for name, shape in shapes.items():
    runs = decode(shape, (2, 3))
    measured = sum(r.stats.new_tokens for r in runs) / sum(r.stats.target_passes for r in runs)
    print(
        f"{name:15}: {shape.size:2} nodes, predicted {shape.expected_tokens(rates):.2f}, measured {measured:.2f} tokens a pass"
    )

# %% [markdown]
# ## When a tree pays
# A tree needs many nodes, so it pays where a pass over many tokens costs little more than one over few. The same rates, three machines: t(n)
# flat, t(n) rising gently, t(n) rising steeply.

# %%
rates, sizes = (0.7, 0.1, 0.05, 0.03), (2, 3, 5, 9, 13, 17, 25, 33, 49, 64)
fig, ax = plt.subplots()
for slope, name in ((0.0, "flat"), (0.05, "+5 % a token"), (0.2, "+20 % a token")):
    costs = planner.Costs({1: 1.0, 64: 1.0 + 63 * slope}, draft_step=0.05)
    trees = [
        max(
            (Tree.best(rates, n, d) for d in range(1, 11)),
            key=lambda t: costs.speed_up(t.expected_tokens(rates), t.size, t.max_depth),
        )
        for n in sizes
    ]
    (line,) = ax.plot(
        sizes,
        [costs.speed_up(t.expected_tokens(rates), t.size, t.max_depth) for t in trees],
        "o-",
        label=f"tree, t(n) {name}",
    )
    ax.axhline(costs.best_chain(0.7)[1], color=line.get_color(), linestyle=":", linewidth=1.5)
ax.set(
    xscale="log", xlabel="nodes", ylabel="speed-up", title="Best tree of each size (dotted: best chain)", ylim=(0, 4.2)
)
ax.minorticks_off()
ax.set_xticks([2, 4, 8, 16, 32, 64], ["2", "4", "8", "16", "32", "64"])
ax.legend(fontsize=11)
plt.show()

# %% [markdown]
# Only where t(n) is flat does the big tree win. Your own t(n) is the plot of notebook 01.
#
# ## Summary
# - A tree is scored in one pass: each node sees its ancestors and itself, at position n - 1 + depth.
# - Siblings are drawn without replacement, and each coin uses the law its token was really drawn from; or use `match`.
# - E[tokens] adds up the chance that each node is reached; Sequoia's programme maximises it. A sure draft's best tree is a chain.
# - Trees pay where t(n) is flat.
#
# **Papers.** SpecInfer [2305.09781](https://arxiv.org/abs/2305.09781); Sequoia [2402.12374](https://arxiv.org/abs/2402.12374); recursive rejection
# sampling without replacement [2402.14160](https://arxiv.org/abs/2402.14160); EAGLE-2 [2406.16858](https://arxiv.org/abs/2406.16858).
