"""make doctor: facts first (checks.py), then what they mean (python_side, gpu, sm120, machine). Standard library alone."""
