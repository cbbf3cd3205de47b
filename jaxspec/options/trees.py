"""Checks and defaults of the options of trees of draft tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxspec.common.errors import UserError, quoted
from jaxspec.common.values import whole
from jaxspec.drafters import methods

MAX_WIDTH = 64
MAX_NODES = 257  # maximum number of nodes of a tree, the root (the last token of the text) included
COUNTS = {"tree_width": MAX_WIDTH, "tree_depth": MAX_NODES - 1, "tree_nodes": MAX_NODES}
WIDTH, DEPTH = 4, 4  # defaults of tree_width and tree_depth

# Path to a node of a tree: for each level, the rank (from 0) of a token among the draft's most probable tokens.
Path = tuple[int, ...]


def checked(config: Any) -> dict[str, Any]:
    """Check the tree options of a SpeculativeConfig that sets some of them.

    Return them with values for the others, and the options that they determine: num_speculative_tokens and
    rejection_sample_method.

    Raises: UserError for an impossible tree, or for options that exclude trees.
    """
    given = {}
    for name, most in COUNTS.items():
        value = getattr(config, name)
        if value is not None:
            given[name] = whole(name, value, 1, most)
    found = sized(given) if config.tree_choices is None else fixed(config.tree_choices, given)
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
            f"rejection_sample_method={config.rejection_sample_method!r} does not verify trees: leave it out, "
            "trees use the coupled rule"
        )
    return found | {"num_speculative_tokens": nodes - 1, "rejection_sample_method": "coupled"}


def sized(given: dict[str, int]) -> dict[str, Any]:
    """Return the options of a tree whose shape is chosen in each round, from the probabilities of candidate tokens.

    given: the tree options that the user set. Defaults are used for the others.
    """
    width = given.get("tree_width", WIDTH)
    depth = given.get("tree_depth", DEPTH)
    nodes = given.get("tree_nodes", width * depth + 1)
    least = width * (depth - 1) + 2
    most = width + (depth - 1) * width**2 + 1
    if not least <= nodes <= min(most, MAX_NODES):
        raise UserError(
            f"tree_nodes={nodes} must lie in {least}..{min(most, MAX_NODES)} with tree_width={width} and "
            f"tree_depth={depth}: the draft's own nodes stand in the same places, and there are no more candidates"
        )
    return {"tree_width": width, "tree_depth": depth, "tree_nodes": nodes}


def fixed(choices: Any, given: dict[str, int]) -> dict[str, Any]:
    """Return the options of a tree of fixed shape, with its paths sorted by level.

    choices: value of tree_choices, the path to each node. given: the other tree options that the user set.
    """
    line = f"tree_choices={quoted(choices)} must be a list of paths, each a list of ranks below {MAX_WIDTH}"
    if not is_list(choices):
        raise UserError(line)
    choices = list(choices)
    if not all(map(is_list, choices)):
        raise UserError(line)
    paths: list[Path] = [tuple(whole("a rank of tree_choices", x, 0, MAX_WIDTH - 1) for x in path) for path in choices]
    known = set(paths)
    if not paths or len(paths) >= MAX_NODES or () in known or len(known) < len(paths):
        raise UserError(f"{line}, at least one of them and each once")
    for path in paths:
        if path[:-1] and path[:-1] not in known:
            raise UserError(f"tree_choices has {list(path)}, but not {list(path[:-1])}, its parent: add that")
    found = {"tree_width": 1 + max(map(max, paths)), "tree_depth": max(map(len, paths)), "tree_nodes": len(paths) + 1}
    for name, value in given.items():
        # Equal values are allowed, because a config that was checked before has all of these options set.
        if value != found[name]:
            raise UserError(f"tree_choices is given, and {name}={value}: drop one of them")
    return {"tree_choices": tuple(sorted(paths, key=lambda path: (len(path), path)))} | found


def is_list(value: Any) -> bool:
    """Return whether the value can be read as a list: whether it is an iterable other than str and bytes."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)
