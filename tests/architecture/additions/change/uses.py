"""A change of a job is tried by `ask changes`, and named with what it saves."""

import json

from shared import run_command

changes = json.loads(run_command("ask", "changes", "llama3.2-1b", "h100:8", "dp8 mbs1", "--gbs", "8", "--json"))
(change,) = (change for change in changes if change["change"] == "sgd")
assert change["saved_bytes"] > 0
assert change["faster"] > 1
