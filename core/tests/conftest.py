from rlrun.testing.ranks import ranks1, ranks2  # noqa: F401
