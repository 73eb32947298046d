"""One set-up for every test: eight virtual CPU devices, no silent rank promotion, a warm cache."""

import os
import pathlib

import jax

# Processes that a test starts inherit the platform. A test run on an accelerator names it.
jax.config.update('jax_platforms', os.environ.setdefault('JAX_PLATFORMS', 'cpu'))
jax.config.update('jax_num_cpu_devices', 8)

# Strict dtype promotion stays off: optax.adam and optax.MultiSteps do not trace under it.
jax.config.update('jax_numpy_rank_promotion', 'raise')

# Most steps compile in 0.2 s to 0.5 s and load in 0.1 s. The key covers the processor's features.
_CACHE = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache').expanduser()
jax.config.update('jax_compilation_cache_dir', str(_CACHE / 'jax_dsgd' / 'xla'))
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)
jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
