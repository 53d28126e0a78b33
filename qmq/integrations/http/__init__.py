"""Send and receive over HTTP: for CloudEvents, and for programs that have only HTTP. docs/integrations/http.md is the tutorial.

http_requests   what a request asks for             pure
openapi         the description of the interface    pure
group_receipts  messages that requests hold
http_clients    a client of the cluster for each token
http_site       the routes
http_server     the site as a server
"""
