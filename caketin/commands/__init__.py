"""The commands that have a module of their own; `caketin.cli` lists them all."""
