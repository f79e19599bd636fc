"""Attention backends, each declaring where its reads of shared rows end."""
