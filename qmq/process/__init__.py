"""What a process needs of its system: files, an event loop, a description of itself."""
