"""``python -m jaxserve`` is ``jaxserve``."""

from __future__ import annotations

from jaxserve.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
