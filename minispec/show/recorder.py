"""`record`: decode one prompt and write down everything that decided it."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from minispec import __version__
from minispec.decode import stream
from minispec.drafters import Drafter, NoDrafter
from minispec.inputs import check_integer, check_sampling, choose, is_batch, stop_set
from minispec.model import LanguageModel
from minispec.result import Step, summarise
from minispec.sampling import Randomness, Rng, Sampling
from minispec.show import coins
from minispec.show.trace import SCHEMA, Trace, law, laws, short
from minispec.show.watchers import Choice, Seen, Watch
from minispec.tokenizer import Tokenizer
from minispec.tree import Tree
from minispec.verify import Rule


class Recording:
    """A run that is being recorded: iterate over it for its `Step`s, then take the `trace`. Arguments: see `record`."""

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | Drafter | None,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        tokenizer: Tokenizer | None = None,
        top: int = 20,
        sampling: Sampling | None = None,
        tree: Tree | str | None = None,
        draft_len: int | None = None,
        rule: str | Rule | None = None,
        stop: Sequence[int] | None = None,
        seed: int | None = None,
        rng: Rng | None = None,
    ) -> None:
        if is_batch(prompt):
            raise TypeError("prompt: a trace follows one row; give one prompt, a list of token ids")
        self.top = check_integer("top", top, 1)
        if seed is not None and rng is not None:
            raise ValueError("give either seed or rng, got both")
        if isinstance(tree, str):
            raise TypeError(f"tree must be a Tree, got {tree!r}: give a plan's own, such as speculate(...).plan.tree")
        sampling = check_sampling(sampling)
        drafter, self.rule = choose(target, NoDrafter() if draft is None else draft, sampling, tree, draft_len, rule)
        self.seed = secrets.randbits(53) if seed is None and rng is None else seed  # 53: exact in any JSON reader
        self.watch = Watch(target, drafter, self.rule, Randomness(self.seed, 1) if rng is None else rng)
        self.tokenizer, self.sampling, self.max_new_tokens = tokenizer, sampling, max_new_tokens
        self.decoder = None if tokenizer is None else tokenizer.stream()
        watch = self.watch
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop}
        self._steps = stream(watch.target, watch.drafter, prompt, rule=watch.rule, rng=watch.rng, **options)
        self.prompt = [int(token) for token in prompt]
        self.stop = sorted(stop_set(stop, watch.target.end_of_text, target.config.vocab_size))
        self.name = "none" if draft is None else type(drafter).__name__
        self.taken: list[Step] = []
        self.steps: list[dict[str, Any]] = []
        self.used: set[int] = set(self.prompt)
        self.prefill_ms = 0.0

    def __iter__(self) -> Iterator[Step]:
        while True:
            start = time.perf_counter()
            step = next(self._steps, None)
            if step is None:
                return
            ms = 1e3 * (time.perf_counter() - start)
            if not self.steps:  # the prompt's pass is no step
                self.prefill_ms = max(ms - self._spent(), 0.0)
            self.steps.append(self._encode(step, ms if self.steps else self._spent()))
            self.taken.append(step)
            yield step

    def _spent(self) -> float:
        seen = self.watch.seen
        return seen.draft_ms + sum(p.ms for p in seen.target_passes) + seen.verify_ms

    def trace(self, plain_ms: float | None = None) -> Trace:
        """What has been recorded so far. plain_ms: time of a plain step, for the page's running speed-up."""
        tokens = [token for step in self.taken for token in step.tokens]
        stats = summarise(self.taken, sum(step["ms"]["step"] for step in self.steps) / 1e3)
        names = ("new_tokens", "target_passes", "proposed", "tested", "accepted")
        rates = ("tokens_per_pass", "acceptance_rate", "accepted_per_proposed")
        figures = {name: getattr(stats, name) for name in names} | {
            name: None if getattr(stats, name) is None else short(getattr(stats, name)) for name in rates
        }
        sampling, config = self.sampling, self.watch.target.config
        data = {
            "schema": SCHEMA,
            "minispec": __version__,
            "rule": self.rule.name,
            "drafter": self.name,
            "sampling": {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p},
            "seed": self.seed,
            "device": str(self.watch.target.device),
            "vocab_size": config.vocab_size,
            "block_size": config.block_size,
            "top": self.top,
            "prompt": self.prompt,
            "prompt_text": self._join(self.prompt),
            "texts": {str(token): self._text(token) for token in sorted(self.used)},
            "stop": self.stop,
            "max_new_tokens": self.max_new_tokens,
            "tokens": tokens,
            "text": self._join(tokens),
            "finish_reason": self.taken[-1].finish_reason if self.taken else None,
            "stats": figures | {"seconds": short(stats.seconds)},
            "plain_ms": None if plain_ms is None else short(plain_ms),
            "prefill_ms": short(self.prefill_ms),
            "steps": self.steps,
        }
        return Trace(data)

    def _encode(self, step: Step, ms: float) -> dict[str, Any]:
        seen = self.watch.seen
        assert seen.draft is not None
        assert seen.p is not None
        tree, tokens = seen.draft.tree, seen.draft.tokens[0].tolist()
        early = self.watch.target.device.type == "cpu"
        about = coins.places(self.rule, [choice.outcome for choice in seen.coins], tokens, tree, seen.path, early)
        last = seen.coins[-1].weights.double() if seen.coins else seen.p[seen.path[-1]].double()
        found: dict[str, Any] = {
            "n": len(self.prompt) + sum(len(s.tokens) for s in self.taken),
            "kind": seen.draft.kind,
            "nodes": self._nodes(seen, about, tokens),
            "draws": _choices(seen.draws, [[None] * len(choice.outcome) for choice in seen.draws]),
            "coins": _choices(seen.coins, about),
            "path": seen.path,
            "token": seen.token,
            "how": self._how(step),
            "law": law(last / last.sum(), self.top, seen.token),
            "emitted": list(step.tokens),
            "pieces": [self._piece(token) for token in step.tokens],
            "accepted": step.accepted,
            "tested": step.tested,
            "proposed": step.proposed,
            "cache": self._cache(seen),
            "ms": {
                "draft": short(seen.draft_ms),
                "target": short(sum(p.ms for p in seen.target_passes)),
                "verify": short(seen.verify_ms),
                "step": short(ms),
            },
            "finish_reason": step.finish_reason,
        }
        self.used |= {seen.token, *step.tokens, *found["law"]["token"]}
        return found

    def _how(self, step: Step) -> str:
        """Where the last token comes from: the law's residual, the bonus law, an own draw; or the run was cut."""
        if step.accepted == len(step.tokens):
            return "cut"
        if not step.proposed:
            return "own"
        if step.tested == step.accepted:
            return "bonus"
        return "residual" if self.rule.needs_q else "own"

    def _nodes(self, seen: Seen, about: coins.Places, tokens: list[int]) -> list[dict[str, Any]]:
        assert seen.draft is not None
        assert seen.p is not None
        tree, q = seen.draft.tree, None if seen.draft.q is None else seen.draft.q[0].detach().cpu()
        p, depths, parents = seen.p, tree.depths[0].tolist(), tree.of_row(0)
        tested_against = coins.laws(self.rule, about, p, q, tree)
        asked = {node: k for k, place in enumerate(about) for node in place if seen.coins[k].op == "flip"}
        nodes: list[dict[str, Any]] = []
        for i, token in enumerate(tokens):
            node: dict[str, Any] = {"token": token, "parent": parents[i], "depth": depths[i]}
            node["state"] = _state(i, token, seen.path, parents, i in asked, self.rule)
            node["next"] = law(p[i].double(), self.top) if token >= 0 else None
            if i and token >= 0:
                node["test"] = _test(tested_against[i], None if q is None else q[i], token, self.top)
                node["test"]["coin"] = asked.get(i)
                self.used |= set(node["test"]["laws"]["token"])
            self.used |= ({token} - {-1}) | set(node["next"]["token"] if node["next"] else ())
            nodes.append(node)
        return nodes

    def _cache(self, seen: Seen) -> dict[str, Any]:
        read = seen.target_passes[0]
        kept = [i for i, node in enumerate(seen.path) if i != node]
        target = {"before": read.before, "read": read.tokens, "after": self.watch.target.length, "moved": kept}
        small = self.watch.small
        if small is None:
            return {"target": target, "draft": None}
        passes = seen.draft_passes
        start = passes[0].before if passes else seen.draft_before
        end = passes[-1].before + passes[-1].tokens if passes else start
        root = read.before  # the slot of node 0, in either cache
        path = [node for node in seen.path if node < end - root]
        gathered = len(path) == small.length - root  # else the drafter drops the tree, to read the path again
        return {
            "target": target,
            "draft": {
                "before": seen.draft_before,
                "rolled_back": start,
                "passes": [one.tokens for one in passes],
                "end": end,
                "after": small.length,
                "moved": [i for i, node in enumerate(path) if i != node] if gathered else [],
            },
        }

    def _text(self, token: int) -> str:
        """A token as text; bytes that are no character of their own as <E2>."""
        if self.tokenizer is None:
            return str(token)
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(chr(byte) if 32 <= byte < 127 else f"<{byte:02X}>" for byte in data)

    def _piece(self, token: int) -> str:
        return f" {token}" if self.decoder is None else self.decoder.feed(token)

    def _join(self, tokens: Sequence[int]) -> str:
        if self.tokenizer is not None:
            return self.tokenizer.decode(tokens)
        return " ".join(map(str, tokens))


def _state(i: int, token: int, path: list[int], parents: Sequence[int], asked: bool, rule: Rule) -> str:
    if i == 0:
        return "pending"
    if token < 0:
        return "absent"
    if i in path:
        return "accepted"
    on_path = parents[i] in path
    rejected = on_path if not rule.needs_q else asked and on_path
    return "rejected" if rejected else "untested"


def _test(p: torch.Tensor, q: torch.Tensor | None, x: int, top: int) -> dict[str, Any]:
    """p(x), q(x), min(1, p/q) and sum min(p, q) of one draft token, and both laws where they are large."""
    p = p.double()
    both = None if q is None else q.double()
    p_x, q_x = float(p[x]), None if both is None else float(both[x])
    known = both is not None and q_x
    return {
        "x": {"p": short(p_x), "q": None if q_x is None else short(q_x)},
        "ratio": short(min(1.0, p_x / float(q_x or 1.0))) if known else None,
        "alpha": short(float(p.minimum(both).sum())) if both is not None else None,
        "laws": laws(p, both, x, top),
    }


def _choices(choices: Sequence[Choice], about: coins.Places) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for choice, nodes in zip(choices, about, strict=True):
        one: dict[str, Any] = {"op": choice.op, "outcome": choice.outcome, "node": nodes}
        if choice.op == "flip":
            one["prob"] = [min(max(short(value), 0.0), 1.0) for value in choice.weights.tolist()]
        else:
            one["at"] = choice.at
        found.append(one)
    return found


def record(
    target: LanguageModel,
    draft: LanguageModel | Drafter | None,
    prompt: Sequence[int],
    *,
    plain_steps: int = 0,
    **options: Any,
) -> Trace:
    """`speculate` for one prompt, recorded: the same tokens under the same seed, and how they came about.

    draft: a model, a `Drafter`, or None for plain decoding. options: those of `speculate`, and
        tokenizer: for texts; without it tokens are shown by their ids.
        top: how many tokens of a distribution are kept (default 20); the mass of the rest is.
    plain_steps: also time so many steps of plain decoding, so that the page can show a speed-up.

    One row: a list of prompts raises `TypeError`. Other errors as for `speculate`.
    """
    recording = Recording(target, draft, prompt, **options)
    for _ in recording:
        pass
    return recording.trace(plain_step(target, prompt, recording.sampling, plain_steps))


def plain_step(target: LanguageModel, prompt: Sequence[int], sampling: Sampling, steps: int) -> float | None:
    """Median milliseconds of a step of plain decoding; None when there is no step to time."""
    times: list[float] = []
    if not steps:
        return None
    run = stream(target, NoDrafter(), prompt, max_new_tokens=steps + 2, sampling=sampling, stop=(), seed=0)
    start = time.perf_counter()
    for _ in run:
        times.append(1e3 * (time.perf_counter() - start))
        start = time.perf_counter()
    return statistics.median(times[2:]) if len(times) > 2 else None  # the first two warm up
