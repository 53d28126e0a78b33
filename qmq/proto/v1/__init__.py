"""Version 1. Generated modules: do not edit; run scripts/generate."""
