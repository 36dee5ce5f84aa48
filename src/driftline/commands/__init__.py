"""The subcommands that read a run from outside, a module each; nothing heavy is imported before one of them runs."""
