"""Send and receive over HTTP: for CloudEvents, and for programs that have only HTTP.
docs/integrations/http.md is the tutorial.

requests   what a request asks for             pure
openapi    the description of the interface    pure
clients    a client of the cluster for each token, and messages that requests hold
site       the routes, and the site as a server
"""
