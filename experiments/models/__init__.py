"""Models of the experiments: a config names one of `__all__` and its keyword arguments."""

from experiments.models import losses as losses
from experiments.models._model import Model as Model
from experiments.models.anytime import anytime as anytime
from experiments.models.anytime import exit_losses as exit_losses
from experiments.models.cnn import cnn as cnn
from experiments.models.linear import linear as linear
from experiments.models.mlp import mlp as mlp
from experiments.models.transformer import transformer as transformer

__all__ = ('cnn', 'linear', 'mlp', 'transformer')
