"""What is sent: the wire formats of a leaf. See `Compressor` for the contract."""

from jax_dsgd.compressors._compressor import Compressor as Compressor
from jax_dsgd.compressors._compressor import sum_of_decoded as sum_of_decoded
from jax_dsgd.compressors._dense import cast as cast
from jax_dsgd.compressors._dense import identity as identity
from jax_dsgd.compressors._policy import Policy as Policy
from jax_dsgd.compressors._policy import by_leaf as by_leaf
from jax_dsgd.compressors._quantize import natural as natural
from jax_dsgd.compressors._quantize import qsgd as qsgd
from jax_dsgd.compressors._quantize import scaled_blocks as scaled_blocks
from jax_dsgd.compressors._quantize import ternary as ternary
from jax_dsgd.compressors._sign import mean_magnitude as mean_magnitude
from jax_dsgd.compressors._sign import scaled_sign as scaled_sign
from jax_dsgd.compressors._sign import unit_magnitude as unit_magnitude
from jax_dsgd.compressors._sparsify import block_top_k as block_top_k
from jax_dsgd.compressors._sparsify import random_k as random_k
from jax_dsgd.compressors._sparsify import sign_top_k as sign_top_k
from jax_dsgd.compressors._sparsify import top_k as top_k
from jax_dsgd.compressors._threshold import importance_sampling as importance_sampling
from jax_dsgd.compressors._threshold import sampled_top_k as sampled_top_k
from jax_dsgd.compressors._threshold import threshold as threshold
