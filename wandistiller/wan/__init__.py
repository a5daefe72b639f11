"""Everything that knows Wan: pipeline folder, transformer, VAE, text encoder, sampling loop, FLOPs."""
