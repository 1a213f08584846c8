"""minispec: speculative decoding, minimal, readable and proved lossless."""

import minispec.advanced  # noqa: F401 - names its rules
from minispec.cache import KVCache
from minispec.decode import generate, speculate, stream
from minispec.drafters import Draft, Drafter, ModelDrafter
from minispec.early_exit import EarlyExitDrafter
from minispec.model import GPT, GPTConfig
from minispec.ngram import NGramDrafter
from minispec.pair import Pair, load_pair
from minispec.result import Result, Stats, Step
from minispec.sampling import Randomness, Rng, Sampling
from minispec.tokenizer import Tokenizer
from minispec.tree import Tree
from minispec.verify import RULES, Rule

__version__ = "0.1.0"

__all__ = [
    "GPT",
    "RULES",
    "Draft",
    "Drafter",
    "EarlyExitDrafter",
    "GPTConfig",
    "KVCache",
    "ModelDrafter",
    "NGramDrafter",
    "Pair",
    "Randomness",
    "Result",
    "Rng",
    "Rule",
    "Sampling",
    "Stats",
    "Step",
    "Tokenizer",
    "Tree",
    "generate",
    "load_pair",
    "speculate",
    "stream",
]
