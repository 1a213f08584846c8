# %% [markdown]
# # 02 · The cache, and how to take things back
#
# *25 minutes. You need: 01; a rough idea of attention.*
#
# **Goals.** You can say what a KV-cache holds; show that a cached pass equals an uncached one; roll a cache back by changing
# **one number**; and recognise the bug that most implementations had at some time: a stale row.

# %%
import matplotlib.pyplot as plt
import torch

import minispec
from minispec import KVCache, stopwatch
from minispec.teach import check, compare, device, prompts, source, style

style()
pair = minispec.load_pair(device=device())
target, draft, tokenizer = pair.target, pair.draft, pair.tokenizer
text = prompts(pair, 2)[1] + tokenizer.encode(", 'Go out into the world and find")
print(tokenizer.decode(text), f"\n{len(text)} tokens")

# %% [markdown]
# ## What is cached
# In attention a token's *query* looks at the *keys* of all tokens up to itself and mixes their *values*. Keys and values of a
# token never change afterwards, as nothing later can influence them. So they are computed once and kept: that is the KV-cache.
# Each new token costs one row of work instead of the whole text's.
#
# The cache here is one block of memory with S *slots*, allocated once, and a **length**: slots from there on hold nothing that
# counts.
#
# ### Exercise 1
# Attention of one query over a cache: only the first `length` slots count. Scores are divided by the square root of D.


# %% exercise 02.attend
def my_attend(query, keys, values, length):
    """query (D,), keys and values (S, D), of which the first `length` slots count -> (D,)."""
    ...


# %% solution 02.attend
def my_attend(query, keys, values, length):
    """query (D,), keys and values (S, D), of which the first `length` slots count -> (D,)."""
    scores = keys[:length] @ query / query.shape[0] ** 0.5  # (length,)
    return scores.softmax(0) @ values[:length]


# %%
check("02.attend", my_attend)

# %% [markdown]
# ## A cached pass equals an uncached one
# The same text in one uncached pass, and in pieces through a cache.

# %%
ids = torch.tensor([text], device=target.device)  # (1, T)
with torch.no_grad():
    whole = target(ids)  # (1, T, V)
    cache = KVCache(target.config, capacity=256, device=target.device)
    pieces = [target(piece, cache) for piece in torch.split(ids, [5, 1, 1, 4, ids.shape[1] - 11], dim=1)]
difference = float((torch.cat(pieces, 1) - whole).abs().max())
print(f"cached rows: {cache.lengths[0]}, largest difference of a logit: {difference:.1e} (rounding of float32)")

# %% [markdown]
# **Predict:** how does the time per token grow with the length of the text, with the cache and without?

# %%
lengths = [16, 64, 128, 192, 240]
with_cache, without = [], []
with torch.no_grad():
    for n in lengths:
        long = torch.zeros(1, n, dtype=torch.long, device=target.device)
        cache = KVCache(target.config, capacity=256, device=target.device)
        target(long, cache)

        def one_token(n=n, cache=cache):
            cache.rollback(n)
            target(torch.zeros(1, 1, dtype=torch.long, device=target.device), cache)

        with_cache.append(min(stopwatch.seconds(one_token, target.device) for _ in range(7)))
        without.append(min(stopwatch.seconds(lambda long=long: target(long), target.device) for _ in range(3)))
fig, ax = plt.subplots()
ax.plot(lengths, [1e3 * t for t in without], "s--", label="without a cache: read it all again")
ax.plot(lengths, [1e3 * t for t in with_cache], "o-", label="with a cache: one row")
ax.set(xlabel="tokens so far", ylabel="milliseconds for one more", title="What the cache saves", ylim=(0, None))
ax.legend()
plt.show()

# %% [markdown]
# ## Taking guesses back
# Speculative decoding writes guesses into the cache before it knows whether they stand. A row has n tokens, the last of which
# is *pending*: emitted, but not yet read, so the cache holds n - 1 rows. One pass reads the pending token and K guesses. Then the
# first `accepted` guesses stand, and the rest must go.
#
# ### Exercise 2
# How many rows must the cache be rolled back to?


# %% exercise 02.rollback
def my_length(n, K, accepted):
    """Rows to keep after a pass over the pending token and K guesses; n - 1 rows were there before."""
    ...


# %% solution 02.rollback
def my_length(n, K, accepted):
    """Rows to keep after a pass over the pending token and K guesses; n - 1 rows were there before."""
    return n - 1 + 1 + accepted


# %%
check("02.rollback", my_length)

# %% [markdown]
# This is the package's rollback. Nothing is moved and nothing is erased:

# %%
source(KVCache.rollback)

# %%
n, K, accepted = len(text), 4, 2
guesses = tokenizer.encode(" a golden bird in a tree")[:K]
other = tokenizer.encode(" ring")[:1]  # what the target says instead of the third guess
with torch.no_grad():
    cache = KVCache(target.config, capacity=256, device=target.device)
    target(ids[:, :-1], cache)  # n - 1 rows
    rows = [cache.lengths[0]]
    target(torch.tensor([text[-1:] + guesses], device=target.device), cache)  # the pending token and K guesses
    rows.append(cache.lengths[0])
    cache.rollback(n + accepted)
    rows.append(cache.lengths[0])
    after = target(torch.tensor([other], device=target.device), cache)[0, -1]
    fresh = target(torch.tensor([text + guesses[:accepted] + other], device=target.device))[0, -1]
print("rows before, after the pass, after the rollback:", rows)
print(f"next logits, rolled back against never guessed: {float((after - fresh).abs().max()):.1e}")

# %% [markdown]
# ## Break it
# Keep **one row too many** after every rejection: the row of a guess that was rejected. The code runs, the text looks fine.
# Let us decode greedily by hand, once right and once with that bug, and compare the laws for the next token at each place.
#
# **Predict:** how far is the law off in the second step: 0.001, 0.01, 0.1, or 0.5 in total variation?

# %%
my_guess = ...  # total variation


# %%
@torch.no_grad()
def decode(extra, new=40):
    """Greedy text with a wrong guess at every step, `extra` rows too many kept after each; laws of the next token."""
    tokens, laws = list(text), []
    cache = KVCache(target.config, capacity=512, device=target.device)
    target(ids[:, :-1], cache)
    wrong = tokenizer.encode(" stone")[0]
    for _ in range(new):
        position = torch.tensor([[len(tokens) - 1, len(tokens)]], device=target.device)
        both = torch.tensor([[tokens[-1], wrong]], device=target.device)  # the pending token and a guess
        law = target(both, cache, position)[0, 0].softmax(-1)
        laws.append(law.cpu())
        tokens.append(int(law.argmax()))
        cache.rollback(cache.lengths[0] - 1 + extra)  # the guess is rejected every time
    return tokens[len(text) :], torch.stack(laws)


right, right_laws = decode(extra=0)
broken, broken_laws = decode(extra=1)
tv = 0.5 * (right_laws - broken_laws).abs().sum(-1)
same = next((i for i, (a, b) in enumerate(zip(right, broken, strict=True)) if a != b), len(right))
fig, ax = plt.subplots()
ax.bar(range(len(tv)), tv, 0.9, color="C1")
ax.axvline(same, color="k", linestyle=":", label="first different token")
ax.set(xlabel="step", ylabel="TV to the right law", title="One stale row after each rejection", ylim=(0, 1))
ax.legend(loc="upper left")
plt.show()
compare("total variation in the second step", my_guess, float(tv[1]))
print("right :", tokenizer.decode(right).replace("\n", " "))
print("broken:", tokenizer.decode(broken).replace("\n", " "))

# %% [markdown]
# The first token is right, and so a test of the *first* token sees nothing. (Once the texts differ, the bars compare different
# texts.) Notebook 05 shows the tests that do see it.
#
# ## The draft has a cache too
# A draft of K guesses reads K - 1 of them: the last guess is drawn, but not read. If all K are accepted, the draft's cache **lacks
# a row**, and code that forgets this drafts from a text with a hole. The output stays exactly right, as verification does not care
# where guesses come from; only acceptance falls. minispec always re-reads the last two tokens:

# %%
source(minispec.drafters.ModelSession.unread)

# %% [markdown]
# ## Summary
# - A cache holds keys and values of tokens that were read; slots beyond the length do not exist.
# - Rolling back is changing one number; the next pass overwrites what is stale.
# - After `accepted` guesses the target keeps n + accepted rows. One too many, and every later law is wrong.
# - A bug in the *target's* cache changes the law; a bug in the *draft's* only costs speed. They need different tests.
#
# **Papers.** Leviathan et al. [2211.17192](https://arxiv.org/abs/2211.17192); Kwon et al., *PagedAttention*,
# [2309.06180](https://arxiv.org/abs/2309.06180), for what servers do with caches.
