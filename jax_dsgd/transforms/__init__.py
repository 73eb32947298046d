"""What changes over time: optax transforms whose text does not know how many workers there are."""

from jax_dsgd.transforms._gossip import mix_compressed as mix_compressed
from jax_dsgd.transforms._gossip import mix_neighbors as mix_neighbors
from jax_dsgd.transforms._guard import SkipState as SkipState
from jax_dsgd.transforms._guard import skip_nonfinite as skip_nonfinite
from jax_dsgd.transforms._local import LocalStepsState as LocalStepsState
from jax_dsgd.transforms._local import Period as Period
from jax_dsgd.transforms._local import local_steps as local_steps
from jax_dsgd.transforms._momentum import sign_momentum as sign_momentum
from jax_dsgd.transforms._reduce import MeanState as MeanState
from jax_dsgd.transforms._reduce import compressed_mean as compressed_mean
from jax_dsgd.transforms._reduce import mean_over as mean_over
from jax_dsgd.transforms._reduce import vote_majority as vote_majority
