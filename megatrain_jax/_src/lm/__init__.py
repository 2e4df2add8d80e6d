"""Language models, built on the public names of the engine as any user's program."""
