"""Shapes in annotations: `Float[Array, "B K V"]`. They are checked in the tests (jaxtyping with beartype), never here.

The axis letters, everywhere the same:

  B rows                          H query heads             P pages in the pool
  K draft tokens a round          G key-value heads         S page size, in tokens
  T tokens of a row in one pass   D head size               N pages a row may hold
  V vocabulary                    E model width             R rounds a launch
  L layers                        F MLP width               M numbers of a token's features

The target's pass over K drafts has T = K + 1. `_` is an axis of no interest, `*rest` or `...` any number of axes. A
single letter is written with a space before it, " B": linters take it for a name otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax import Array

__all__ = ["Array", "Bool", "Float", "Int", "Key", "Shaped", "UInt"]

AXES = "BKTVLHGDEFPSNRM"

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Key, Shaped, UInt
else:
    try:
        from jaxtyping import Bool, Float, Int, Key, Shaped, UInt
    except ImportError:

        class Unchecked:
            """Stands in where jaxtyping, which only the tests need, is not installed: Float[Array, "B V"] is Array."""

            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int = Key = Shaped = UInt = Unchecked
