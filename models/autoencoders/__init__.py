"""Autoencoders: pictures and films to latents and back."""
