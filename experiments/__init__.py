"""The experiment application of jax_dsgd: data, models, training and measurement."""
