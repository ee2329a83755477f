"""Modules that Aerie's scripts share. Imports point one way: numbered script -> aerie -> libraries."""

import os

# Read when torch loads OpenMP, here and in every process started from here. With OpenMP's default a thread that waits for its sibling spins; where other
# programs want the same cores, that made a decode step ten times slower (measured, LOG.md 2026-11-29).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
