"""Data of the experiments, NumPy only: data sets, splits over workers, batches."""

from experiments.data import batches as batches
from experiments.data import datasets as datasets
from experiments.data import splits as splits
