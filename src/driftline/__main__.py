"""`python -m driftline` is `driftline`."""

from driftline.cli import main

main()
