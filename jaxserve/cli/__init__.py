"""The ``jaxserve`` command. Importing it does not import JAX, so ``--help`` is quick."""
