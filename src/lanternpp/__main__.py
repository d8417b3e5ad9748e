"""The command line, as the console script, `python -m lanternpp` and `accelerate launch -m lanternpp` run it."""

try:
    from lanternpp.cli import main
except KeyboardInterrupt:  # later ones are `main`'s
    raise SystemExit(130) from None

if __name__ == "__main__":
    main()
