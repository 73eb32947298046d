import numpy as np
import pytest

from experiments.data import blocks, datasets


def test_rounds_of_three_blocks():
  block = blocks.in_turn(rounds=2, blocks=3)
  assert [block(np.int32(r)) for r in range(8)] == [0, 0, 1, 1, 2, 2, 0, 0]


def test_classes_are_divided_as_evenly_as_may_be():
  data = datasets.digits()
  block = blocks.of_classes(data, np.arange(10), blocks=4)
  assert block.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]


@pytest.mark.parametrize(('count', 'message'), [(0, '^blocks must be'), (11, '^blocks=11 of cla')])
def test_wrong_numbers_of_blocks_are_refused(count, message):
  with pytest.raises(ValueError, match=message):
    blocks.of_classes(datasets.digits(), np.arange(10), blocks=count)


def test_only_classes_make_blocks():
  data = datasets.quadratics()
  with pytest.raises(ValueError, match="data set 'quadratics' has 1, and targets of shape"):
    blocks.of_classes(data, data.targets, blocks=1)
