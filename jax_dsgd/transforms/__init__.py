"""What changes over time: optax transforms whose text does not know how many workers there are."""

from jax_dsgd.transforms._gossip import mix_compressed as mix_compressed
from jax_dsgd.transforms._gossip import mix_neighbors as mix_neighbors
from jax_dsgd.transforms._guard import SkipState as SkipState
from jax_dsgd.transforms._guard import skip_nonfinite as skip_nonfinite
from jax_dsgd.transforms._lazy import LazyState as LazyState
from jax_dsgd.transforms._lazy import lazy_mean as lazy_mean
from jax_dsgd.transforms._local import LocalStepsState as LocalStepsState
from jax_dsgd.transforms._local import Period as Period
from jax_dsgd.transforms._local import local_steps as local_steps
from jax_dsgd.transforms._low_rank import Rank as Rank
from jax_dsgd.transforms._low_rank import low_rank_mean as low_rank_mean
from jax_dsgd.transforms._momentum import momentum_from_learning_rate as momentum_from_learning_rate
from jax_dsgd.transforms._momentum import sign_momentum as sign_momentum
from jax_dsgd.transforms._one_bit import FrozenAdamState as FrozenAdamState
from jax_dsgd.transforms._one_bit import scale_by_frozen_adam as scale_by_frozen_adam
from jax_dsgd.transforms._orthogonalize import orthogonalize as orthogonalize
from jax_dsgd.transforms._recompress import recompress as recompress
from jax_dsgd.transforms._reduce import MeanState as MeanState
from jax_dsgd.transforms._reduce import compressed_mean as compressed_mean
from jax_dsgd.transforms._reduce import mean_over as mean_over
from jax_dsgd.transforms._reduce import vote_majority as vote_majority
from jax_dsgd.transforms._residual import AverageResidualState as AverageResidualState
from jax_dsgd.transforms._residual import average_residual as average_residual
from jax_dsgd.transforms._residual import step_ahead as step_ahead
from jax_dsgd.transforms._stages import StagesState as StagesState
from jax_dsgd.transforms._stages import stages as stages
