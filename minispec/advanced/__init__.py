"""What a first reading can skip: traversal verification, dynamic trees, adaptive draft lengths, statistics of trees."""

from minispec.advanced.adaptive import AdaptiveDrafter, HeuristicDrafter
from minispec.advanced.dynamic import DynamicTree
from minispec.advanced.statistics import acceptance_by_depth, acceptance_by_rank, accepted_depths, winning_branches
from minispec.advanced.traversal import traversal

__all__ = [
    "AdaptiveDrafter",
    "DynamicTree",
    "HeuristicDrafter",
    "acceptance_by_depth",
    "acceptance_by_rank",
    "accepted_depths",
    "traversal",
    "winning_branches",
]
