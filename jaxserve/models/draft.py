"""What draft models have in common."""

from __future__ import annotations

FINAL = -1  # a feature point: the hidden state behind the final norm; others are indices of ``Observe``
