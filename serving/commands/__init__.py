"""The commands of `jaxinfer`, one file each; cli.py registers them. Heavy imports stay inside functions."""
