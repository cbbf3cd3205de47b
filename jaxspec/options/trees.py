"""The options of trees of drafts: what is left out of them is filled in, and what no tree has is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import whole
from jaxspec.drafters import methods

MAX_WIDTH, MAX_NODES = 64, 257  # the pending token among them
COUNTS = {"tree_width": MAX_WIDTH, "tree_depth": MAX_NODES - 1, "tree_nodes": MAX_NODES}
WIDTH, DEPTH = 4, 4  # where they are not said

Path = tuple[int, ...]  # the ranks that lead to a draft


def checked(config: Any) -> dict[str, Any]:
    """All tree options of a SpeculativeConfig that has some, and what follows from them. Raises UserError for a tree
    that cannot be."""
    said = {name: getattr(config, name) for name in COUNTS}
    said = {name: whole(name, value, 1, COUNTS[name]) for name, value in said.items() if value is not None}
    found = sized(said) if config.tree_choices is None else fixed(config.tree_choices, said)
    nodes = found["tree_nodes"]
    if config.num_speculative_tokens not in (type(config).num_speculative_tokens, nodes - 1):
        raise UserError(
            f"num_speculative_tokens={config.num_speculative_tokens}, but a tree of {nodes} nodes has {nodes - 1} "
            "drafts: leave num_speculative_tokens out"
        )
    looks_up, method = methods.split(config.method or "")
    if looks_up or (method and methods.METHODS[method].parameters is None):
        raise UserError(f"method={config.method!r} proposes no trees: drop the tree options, or the prompt lookup")
    if config.rejection_sample_method not in (None, "coupled"):
        raise UserError(
            f"rejection_sample_method={config.rejection_sample_method!r} judges no trees: leave it out, their rule is "
            "the coupled one"
        )
    return found | {"num_speculative_tokens": nodes - 1, "rejection_sample_method": "coupled"}


def sized(said: dict[str, int]) -> dict[str, Any]:
    """A tree that is found anew each round."""
    width, depth = said.get("tree_width", WIDTH), said.get("tree_depth", DEPTH)
    nodes = said.get("tree_nodes", width * depth + 1)
    least, most = width * (depth - 1) + 2, width + (depth - 1) * width**2 + 1
    if not least <= nodes <= min(most, MAX_NODES):
        raise UserError(
            f"tree_nodes={nodes} must lie in {least}..{min(most, MAX_NODES)} with tree_width={width} and "
            f"tree_depth={depth}: the draft's own nodes stand in the same places, and there are no more candidates"
        )
    return {"tree_width": width, "tree_depth": depth, "tree_nodes": nodes}


def fixed(choices: Any, said: dict[str, int]) -> dict[str, Any]:
    """The tree of these paths, level by level."""
    line = f"tree_choices={quoted(choices)} must be a list of paths, each a list of ranks below {MAX_WIDTH}"
    listed = lambda x: isinstance(x, Iterable) and not isinstance(x, str | bytes)
    if not listed(choices) or not all(map(listed, choices := list(choices))):
        raise UserError(line)
    paths: list[Path] = [tuple(whole("a rank of tree_choices", x, 0, MAX_WIDTH - 1) for x in path) for path in choices]
    known = set(paths)
    if not paths or len(paths) >= MAX_NODES or () in known or len(known) < len(paths):
        raise UserError(f"{line}, at least one of them and each once")
    for path in paths:
        if path[:-1] and path[:-1] not in known:
            raise UserError(f"tree_choices has {list(path)}, but not {list(path[:-1])}, which it comes after: add that")
    found = {"tree_width": 1 + max(map(max, paths)), "tree_depth": max(map(len, paths)), "tree_nodes": len(paths) + 1}
    for name, value in said.items():
        if value != found[name]:  # else it is what was found before
            raise UserError(f"tree_choices is given, and {name}={value}: drop one of them")
    return {"tree_choices": tuple(sorted(paths, key=lambda path: (len(path), path)))} | found
