"""The host store on disk, as ordinary Orbax checkpoints."""
