"""One file per package: its settings, as its documentation sets it up. Imported in the package's own environment."""
