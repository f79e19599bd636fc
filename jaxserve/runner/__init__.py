"""Runners own programs and turn a planned batch into device work."""
