# %% [markdown]
# # 00 · Start here
#
# *10 minutes.*
#
# **Goals.** You know what speculative decoding promises, how these notebooks work, and that everything runs on your machine.
#
# ## The promise
# A language model writes one token at a time, and each token takes a full reading of all its weights. Speculative decoding lets a
# small **draft** model guess the next tokens, and the large **target** check all guesses in **one** pass. The text comes two to three
# times faster, and its distribution is **exactly** the target's own: not nearly, exactly.
#
# ```
# the king called his youngest son          K = 4 guesses, one target pass, 1..5 tokens
# ─────────────────────────────────
#  pending    draft proposes (q)            target scores all five places at once (p)
#   "son" →  " to"  " him" "," " and"       accept x with probability min(1, p(x) / q(x))
#              ✓      ✓     ✗                first rejection: draw from norm((p - q)+) instead
# ─────────────────────────────────         all accepted: one bonus token from p
#  emitted:  " to"   " him"  " and"
# ```

# %%
import os
import subprocess
import sys
from pathlib import Path

import minispec
from minispec.teach import check, compare, device, prompts

# %% [markdown]
# ## Is this machine ready?
# `minispec doctor` checks Python, torch, the weights' checksums, a generation, exactness in miniature, and times both models.

# %%
plain_text = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
plain_text |= {"NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1", "COLUMNS": "110"}
command = [sys.executable, "-m", "minispec", "doctor"]
doctor = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=plain_text)
print(doctor.stdout or doctor.stderr)

# %% [markdown]
# ## How the notebooks work
# - **Predict first.** Before something is measured you are asked for a guess. Write it down: being wrong is how one learns here.
# - **Exercises** are cells with a `...` in them. Run the `check` below; it looks at what your code *does*, and when it is wrong
#   it tells you what kind of mistake it looks like, never the solution. Solutions are in `solutions/`.
# - Everything runs offline, and nothing takes longer than half a minute or so.
#
# Try it. You guess before you measure:

# %%
my_guess = ...  # how many tokens does a target pass yield with four guesses? Between 1 and 5.

# %%
pair = minispec.load_pair(device=device())  # .target, .draft, .tokenizer
prompt = prompts(pair, 1)[0]
plain = minispec.generate(pair.target, prompt, max_new_tokens=48, seed=5)
fast = minispec.speculate(pair.target, pair.draft, prompt, max_new_tokens=48, draft_len=4, seed=5)
print(pair.tokenizer.decode(prompt + fast.tokens), "\n")
for name, run in (("plain", plain), ("speculative", fast)):
    print(
        f"{name:12} {run.stats.new_tokens} tokens, {run.stats.target_passes} target passes, {run.stats.seconds:.2f} s"
    )
compare("tokens a pass", my_guess, fast.stats.tokens_per_pass)

# %% [markdown]
# ## Notation
# One letter for one thing, in all notebooks and in the code:
#
# | symbol | in code | meaning |
# |---|---|---|
# | p | `p` | the **target**'s law of the next token, after temperature, top-k and top-p |
# | q | `q` | the law that the **draft** token was really drawn from |
# | K | `draft_len` | draft tokens in a chain |
# | a | `acceptance_rate` | probability that a tested guess stands: sum min(p, q) = 1 - TV(p, q) |
# | c | `cost_ratio` | time of a draft step, in plain target passes |
# | t(n) | `pass_time[n]` | time of a target pass over n tokens |
#
# ### Exercise 1
# Look at the picture on top. Which model's law is p, which is q (`"target"` or `"draft"`)? How many guesses K does the step in the picture make, and
# how many target passes does it take?

# %% exercise 00.notation
my_answer = {"p": ..., "q": ..., "K": ..., "passes": ...}

# %% solution 00.notation
my_answer = {"p": "target", "q": "draft", "K": 4, "passes": 1}

# %%
check("00.notation", my_answer)

# %% [markdown]
# ## The way
#
# | notebook | minutes | the question |
# |---|---|---|
# | [01 why decoding is slow](01_why_decoding_is_slow.ipynb) | 20 | why does checking six tokens cost little more than making one? |
# | [02 cache and rollback](02_kv_cache_and_rollback.ipynb) | 25 | how are guesses taken back? |
# | [03 rejection sampling](03_rejection_sampling.ipynb) | 25 | how can a token drawn from the wrong law come out right? |
# | [04 speculative decoding](04_speculative_decoding.ipynb) | 35 | how is the loop written, and what does it gain? |
# | [05 is it lossless?](05_is_it_lossless.ipynb) | 35 | how does one prove it, and find the bug? |
# | [06 trees](06_trees.ipynb) | 35 | when do several guesses for one place pay? |
# | [07 drafts and distillation](07_drafts_and_distillation.ipynb) | 30 | how does one teach a draft? |
# | [08 beyond](08_beyond.ipynb) | 40 | better rules, other drafts, many rows |
# | [09 your hardware and its cost](09_your_hardware_and_its_cost.ipynb) | 25 | what does it save, here and on a larger machine? |
#
# 01, 03 and 04 are the core; 02 and 05 show what goes wrong; the rest is by taste.
#
# ## The package
# Small enough to read in one sitting. Every module is one idea:

# %%
for name in ("model", "cache", "sampling", "tree", "verify", "drafters", "planner", "decode"):
    path = Path(minispec.__file__).parent / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    print(f"{name + '.py':12} {text.count(chr(10)):4} lines   {text.split(chr(34) * 3)[1].splitlines()[0]}")

# %% [markdown]
# **Papers.** Leviathan, Kalman and Matias [2211.17192](https://arxiv.org/abs/2211.17192) and Chen et al.
# [2302.01318](https://arxiv.org/abs/2302.01318) found it independently; Xia et al. [2401.07851](https://arxiv.org/abs/2401.07851) survey what followed.
