"""Device code of one step: pure functions on arrays; knows nothing of requests."""
