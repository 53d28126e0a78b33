"""The committed log in files: a broker's folder, or copies of its segments."""
