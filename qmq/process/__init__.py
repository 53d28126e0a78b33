"""What a process needs of its system: files, addresses, an event loop, a description of itself."""
