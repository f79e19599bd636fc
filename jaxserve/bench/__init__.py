"""Measurements that users can repeat: ``jaxserve bench``. Needs nothing but the package, the plots matplotlib."""
