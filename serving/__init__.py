"""The doors to the engine: the command line (cli.py). Imports jaxinfer; nothing of jaxinfer imports it."""
