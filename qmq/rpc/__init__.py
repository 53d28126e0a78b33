"""How a request travels over gRPC or HTTP, and who is let in."""
