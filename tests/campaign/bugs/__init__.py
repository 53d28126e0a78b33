"""Planted bugs: mistakes that the campaign must find. Each module has a tuple BUGS.

The product has no switch for them. `python -m campaign.bugs NAME broker ...` starts a server with
one of them: it replaces methods of the product's classes in that process, then runs the product's
main function with the rest of the words. `scripts/campaign --bugs` runs each with its test.
"""
