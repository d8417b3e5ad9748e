"""`python -m lanternpp`, and with it `accelerate launch -m lanternpp`: the command line."""

from lanternpp.cli import main

if __name__ == "__main__":
    main()
