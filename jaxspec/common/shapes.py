"""Array types with shapes for annotations, such as `Float[Array, "B K V"]`.

Only the tests check them (jaxtyping, beartype).

The axis letters have the same meaning in every file:

  B rows                          H query heads             P pages in the pool
  K draft tokens a round          G key-value heads         S page size, in tokens
  T tokens of a row in one pass   D head size               N pages a row may hold
  V vocabulary                    E model width             R rounds a launch
  L layers                        F MLP width               M size of a token's features

The target's pass over K draft tokens has T = K + 1. `_` is an axis of any size, `*rest` or `...` any number of axes. A
single letter is written with a space before it, " B": linters would take "B" for the name of a type.
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
            """Replacement of jaxtyping's types where it is not installed: Float[Array, "B V"] is Array."""

            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int = Key = Shaped = UInt = Unchecked
