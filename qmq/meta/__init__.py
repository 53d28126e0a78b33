"""The metaserver: says where things are, and administers. Stateless: what it knows is in the coordination store."""
