"""The losslessness suite, for anyone's code: `pytest --pyargs minispec.checks --rule my_rule.py:verify`.

Options (several may be given; without any the package's own rules and drafters are checked):

    --rule FILE.py:NAME     a verification rule
    --drafter FILE.py:NAME  a drafter, or a factory of one
    --decoder FILE.py:NAME  a whole speculative decoder
    --samples N             outputs sampled for each statistical test, default 3,000 (500 of a decoder called singly)
    --level P               chance that a right part is accused, default 1e-6
    --seed N                to replay a failure; fresh, and printed, by default

What NAME must be (B rows, K draft tokens, V tokens in the vocabulary, N tree nodes with the root, D their depth):

    def chain_rule(p, q, drafted, rng) -> (accepted, token)
        p (B, K+1, V) target laws, q (B, K, V) laws that drafted (B, K) were drawn from -> accepted (B,) in 0..K and
        the next token (B,), both int64. Row b emits drafted[b, :accepted[b]] and token[b]. An absent draft token is
        -1 and has a q of zeros.

    def tree_rule(p, q, tokens, tree, rng) -> (path, token)
        p, q (B, N, V) by node, tokens (B, N), node 0 the last token emitted -> path (B, D+1) of nodes from the root,
        padded with -1, and the next token (B,). `minispec.Rule` says for which drafts it is exact, and may be NAME.

    def drafter(target, draft) -> minispec.Drafter
        of two language models (tokens (B, T), cache, positions, mask) -> logits (B, T, V); or a `Drafter` itself.

    def decoder(target, draft, prompt, n, rng) -> tokens
        the n new tokens. Named `prompts` the third parameter is a list of prompts, and a list of token lists is due;
        named `seed` the fifth is an integer. `sampling` and `stop` may follow, and are then checked too.

rng has `flip(prob)` -> bool tensor, True with that probability, and `pick(weights, at=None)` -> (B,) indices drawn in
proportion to weights (B, V). Every random choice goes through it, so that the suite can enumerate them all.

In tests of one's own, for a decoder (prompt, n, seed) -> tokens of which nothing else is known, there is the fixture
`lossless`: `def test_mine(lossless): lossless(decoder, target)`, which is `minispec.lab.assert_lossless`.
"""
