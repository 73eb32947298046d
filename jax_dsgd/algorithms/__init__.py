"""Published methods: functions named as their papers name them that return chains of transforms."""

from jax_dsgd.algorithms._adaptive import cd_adam as cd_adam
from jax_dsgd.algorithms._adaptive import one_bit_adam as one_bit_adam
from jax_dsgd.algorithms._centralized import allreduce_sgd as allreduce_sgd
from jax_dsgd.algorithms._centralized import ef_sign_sgd as ef_sign_sgd
from jax_dsgd.algorithms._centralized import power_sgd as power_sgd
from jax_dsgd.algorithms._centralized import signum as signum
from jax_dsgd.algorithms._centralized import topk_sgd as topk_sgd
from jax_dsgd.algorithms._decentralized import choco_sgd as choco_sgd
from jax_dsgd.algorithms._decentralized import dsgd as dsgd
from jax_dsgd.algorithms._error_feedback import d_ef_sgd as d_ef_sgd
from jax_dsgd.algorithms._error_feedback import d_qsgd as d_qsgd
from jax_dsgd.algorithms._error_feedback import diana as diana
from jax_dsgd.algorithms._error_feedback import ef21_momentum_sgd as ef21_momentum_sgd
from jax_dsgd.algorithms._error_feedback import ef21_sgd as ef21_sgd
from jax_dsgd.algorithms._error_feedback import linear_ef_sgd as linear_ef_sgd
from jax_dsgd.algorithms._error_feedback import saef_sgd as saef_sgd
from jax_dsgd.algorithms._federated import fed_avg as fed_avg
from jax_dsgd.algorithms._local import local_sgd as local_sgd
from jax_dsgd.algorithms._momentum import scaled_momentum_sgd as scaled_momentum_sgd
from jax_dsgd.algorithms._sparse import dgc_sgd as dgc_sgd
from jax_dsgd.algorithms._sparse import dgs_sgd as dgs_sgd
from jax_dsgd.algorithms._sparse import sasg as sasg
