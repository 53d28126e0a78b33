"""The committed log as it lies in files: a broker's folder, or copies of its segments."""
