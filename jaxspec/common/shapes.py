"""Array types with shapes for type annotations, such as `Float[Array, "B K V"]`.

Only the tests check these shapes (with jaxtyping and beartype).

The axis letters have the same meaning in every file. Only D is also the maximum depth of a draft tree:

  B rows                          H query heads             P pages in the pool
  K draft tokens a round          G key-value heads         S page size, in tokens
  T tokens of a row in one pass   D head size               N pages a row may hold
  V vocabulary                    E model width             R rounds a launch
  L layers                        F MLP width               M size of a token's features

A launch is one run of the decoding program. The target's pass over K draft tokens has T = K + 1. `_` is an axis of any
size, `*rest` or `...` is any number of axes. A single letter is written with a space before it, " B", because linters
would take "B" for the name of a type.
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
            """Replacement of jaxtyping's types if jaxtyping is not installed: Float[Array, "B V"] is Array."""

            def __class_getitem__(cls, item: tuple[Any, str]) -> Any:
                return item[0]

        Bool = Float = Int = Key = Shaped = UInt = Unchecked
