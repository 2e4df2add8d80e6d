"""Checkpoints: the host store on disk, in ordinary Orbax format."""
