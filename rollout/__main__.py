"""`python -m rollout`, and what it says where the interpreter is not the one that the packages were installed for."""

import sys


def run() -> None:
    """Run the command line; one sentence instead of a traceback where a package that it needs is missing."""
    try:
        from rollout.cli import main
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] in ("rollout", "areno"):
            raise
        sys.exit(
            f"error: {sys.executable} has no package {missing.name!r}; the command line needs what this project was installed with; "
            "use .venv/bin/python (`make setup` makes it), or pip install -c constraints.txt -e . for this interpreter"
        )
    main()


if __name__ == "__main__":
    run()
