"""Where code that is not trusted runs: `box.Sandbox` says how, `confine` is the process that goes in first.

This file imports nothing, so that `python -m driftline.environments.sandbox.confine` starts in hundredths of a second.
"""
