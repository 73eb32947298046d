"""Published methods: functions named as their papers name them that return chains of transforms."""

from jax_dsgd.algorithms._centralized import allreduce_sgd as allreduce_sgd
from jax_dsgd.algorithms._centralized import ef_sign_sgd as ef_sign_sgd
from jax_dsgd.algorithms._centralized import signum as signum
from jax_dsgd.algorithms._centralized import topk_sgd as topk_sgd
from jax_dsgd.algorithms._decentralized import choco_sgd as choco_sgd
from jax_dsgd.algorithms._decentralized import dsgd as dsgd
from jax_dsgd.algorithms._federated import fed_avg as fed_avg
from jax_dsgd.algorithms._local import local_sgd as local_sgd
