"""How a process of this package starts another one of its own kind: by module name, with the very packages that it runs itself.

The client's local service, the front and the checks call it. Invariant: a folder in the working directory is imported by a child only
where its parent would import it too.
"""

from __future__ import annotations

import os
import sys


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module; `-P` keeps the working directory out of its search path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return this process's environment, with its own search path for the child."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
