"""Who talks to whom, and over what: certificates and encrypted connections. docs/SECURITY.md has the whole story."""
