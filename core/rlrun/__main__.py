"""`python -m rlrun` is `rl-run`."""

from rlrun.cli import main

main()
