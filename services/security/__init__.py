"""Who may do what on the broker of a run, and the files that say so."""
