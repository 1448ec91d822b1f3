"""`python -m bessemer.cli`: the same as `bessemer`."""

from bessemer.cli import main

main()
