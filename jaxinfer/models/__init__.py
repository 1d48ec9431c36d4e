"""Model families: pure functions from (params, config, caches, batch) to hidden states."""
