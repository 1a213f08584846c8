"""What a first reading can skip: traversal verification, dynamic trees, adaptive draft lengths."""

from minispec.advanced.adaptive import AdaptiveDrafter, HeuristicDrafter
from minispec.advanced.dynamic import DynamicTree
from minispec.advanced.traversal import traversal

__all__ = ["AdaptiveDrafter", "DynamicTree", "HeuristicDrafter", "traversal"]
