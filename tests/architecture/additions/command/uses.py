"""A command is run, lists its option with its help, and has its function in Python with the same help."""

from shared import run_command

import fivefold
from fivefold.model.catalog import build_model

parameters = build_model("llama3-8b").parameters
assert run_command("size", "llama3-8b", "--unit", "weights") == f"{parameters} weights\n"
assert "The unit that is printed." in run_command("size", "--help")
assert "Print the parameters of a model." in run_command("--help")
assert fivefold.size("llama3-8b") == parameters
assert "size" in fivefold.__all__
assert "model : str | Model\n    Catalog name" in str(fivefold.size.__doc__)
