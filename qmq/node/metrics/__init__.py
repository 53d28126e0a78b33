"""The figures of a node's parts, as its metrics endpoint exposes them."""
