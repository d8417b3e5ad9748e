"""The command line, as `python -m lanternpp` and `accelerate launch -m lanternpp` run it."""

from lanternpp.cli import main

if __name__ == "__main__":
    main()
