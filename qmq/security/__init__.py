"""Security: certificates, encrypted connections, principals, access rules, tokens, quotas, audit.
docs/SECURITY.md and docs/ACCESS.md describe them.
"""
