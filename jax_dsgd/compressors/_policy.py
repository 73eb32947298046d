"""Which leaf is sent how."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

from jax_dsgd.compressors._compressor import Compressor, Like
from jax_dsgd.compressors._dense import identity

Condition = int | str | Callable[[str, Like], bool]
Policy = Callable[[str, Like], Compressor | None]


def by_leaf(*rules: tuple[Condition, Compressor | None]) -> Policy:
  """A compressor for each leaf: that of the first rule whose condition holds, else `identity()`.

  It stands wherever a compressor does. To *freeze* leaves use `optax.partition` with
  `optax.set_to_zero()`: they cost nothing there.

  Args:
    rules: pairs of a condition and a compressor. A condition is a number of entries (leaves of at
      least so many), a pattern of the leaf's path ('*/kernel', as of file names), or a predicate
      `(path, like) -> bool`. None as a compressor leaves a leaf unsent: each worker keeps its own.

  Returns:
    A policy: a function from a leaf's path and shape to its compressor.

  Raises:
    ValueError: a rule that is not such a pair.

  >>> import jax
  >>> from jax_dsgd import compressors
  >>> policy = by_leaf(('*/bias', None), (1000, compressors.top_k(0.01)))
  >>> shapes = {'a/bias': (2000,), 'a/scale': (10,), 'a/kernel': (64, 64)}
  >>> [policy(path, jax.ShapeDtypeStruct(shape, 'float32')) for path, shape in shapes.items()]
  [None, identity(), top_k(fraction=0.01)]
  """
  tests = [_test(rule) for rule in rules]

  def choose(path: str, like: Like) -> Compressor | None:
    for test, (_, compressor) in zip(tests, rules, strict=True):
      if test(path, like):
        return compressor
    return identity()

  return choose


def _test(rule: Sequence[Any]) -> Callable[[str, Like], bool]:
  if len(rule) != 2 or not isinstance(rule[1], Compressor | None):
    raise ValueError(f'by_leaf got the rule {rule!r}; accepted are (condition, compressor or None)')
  condition: Any = rule[0]
  if isinstance(condition, bool) or not (isinstance(condition, int | str) or callable(condition)):
    raise ValueError(
      f'by_leaf got the condition {condition!r}; accepted are a number of entries, a pattern of '
      'paths, or a predicate'
    )
  if isinstance(condition, int):
    return lambda path, like: like.size >= condition
  if isinstance(condition, str):
    return lambda path, like: fnmatch.fnmatchcase(path, condition)
  return lambda path, like: bool(condition(path, like))
