"""Building blocks of models: pure functions on arrays, one idea a file."""
