"""Prompts and media, caches of text and latents, buckets, order of samples."""
